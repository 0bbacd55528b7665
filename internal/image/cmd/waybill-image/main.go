// Command waybill-image writes Waybill's container image as an OCI layout, without an engine.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime"

	"waybill/internal/image"
)

func main() {
	o := image.Options{}
	out := flag.String("out", "bin/image", "folder of the OCI layout")
	flag.StringVar(&o.Binary, "binary", "bin/waybill", "static binary")
	flag.StringVar(&o.Roots, "roots", "/etc/ssl/certs/ca-certificates.crt", "CA certificates")
	flag.StringVar(&o.Version, "version", "devel", "version")
	flag.StringVar(&o.Revision, "revision", "", "revision")
	flag.StringVar(&o.Architecture, "arch", runtime.GOARCH, "architecture of the binary")
	flag.Parse()
	img, err := image.Build(o)
	if err == nil {
		err = image.Write(img, *out, "waybill:"+o.Version)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "waybill-image:", err)
		os.Exit(1)
	}
}
