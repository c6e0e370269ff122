module github.com/deadconn/deadconn

go 1.26.0

require (
	github.com/hashicorp/go-multierror v1.1.1
	golang.org/x/net v0.62.0
	golang.org/x/sys v0.50.0
)

require (
	github.com/hashicorp/errwrap v1.0.0 // indirect
	golang.org/x/text v0.43.0 // indirect
)
