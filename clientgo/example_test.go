package clientgo_test

import (
	"log"
	"log/slog"
	"net/http"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/clientgo"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

func ExampleProtect() {
	cfg, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal(err)
	}
	clientgo.Protect(cfg)
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		log.Fatal(err)
	}
	_ = client
}

// A DELETE that is sent again can be answered 404 for its own success, a PUT
// 409. Who cannot live with that narrows what is sent again; a server-side
// apply may be added, which has the same effect twice for one field manager.
func ExampleProtect_retryable() {
	cfg, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal(err)
	}
	clientgo.Protect(cfg, deadconn.Options{
		Logger: slog.Default(),
		Retryable: func(r *http.Request) bool {
			switch r.Method {
			case http.MethodDelete:
				return false
			case http.MethodPatch:
				return r.Header.Get("Content-Type") == string(types.ApplyYAMLPatchType)
			}
			return deadconn.IsIdempotent(r)
		},
	})
}
