module waybill/internal/bench/baseline

go 1.26.0

require github.com/elazarl/goproxy v1.9.4

require (
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/text v0.44.0 // indirect
)
