//go:build !race

package deadconn

const raceEnabled = false
