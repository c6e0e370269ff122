//go:build race

package deadconn

const raceEnabled = true
