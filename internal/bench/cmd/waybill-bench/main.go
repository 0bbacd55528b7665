// Command waybill-bench is the program behind `make bench`: driver, origin, load
// generator and the net/http comparison, as subcommands of one binary.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"waybill/internal/bench"
)

const usage = `usage: waybill-bench run [flags]       measure; see run -h
       waybill-bench profile [flags]   profile Waybill under load; see profile -h
internal: origin CERT KEY AUTHORIZATION | load JSON | nethttp JSON`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "waybill-bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch cmd, rest := args[0], args[1:]; {
	case cmd == "run":
		return measure(ctx, rest)
	case cmd == "profile":
		return profile(ctx, rest)
	case cmd == "origin" && len(rest) == 3:
		return bench.ServeOrigin(ctx, rest[0], rest[1], rest[2], os.Stdout)
	case cmd == "nethttp" && len(rest) == 1:
		return bench.NetHTTPProxy(ctx, rest[0], os.Stdout)
	case cmd == "load" && len(rest) == 1:
		var l bench.Load
		if err := json.Unmarshal([]byte(rest[0]), &l); err != nil {
			return err
		}
		s, err := l.Run(ctx)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(s)
	}
	return errors.New(usage)
}

// common are the flags that both commands have.
func common(f *flag.FlagSet, o *bench.Options) {
	f.StringVar(&o.Waybill, "waybill", "", "`path` of the binary under test")
	f.StringVar(&o.Goproxy, "goproxy", "", "`path` of the base, built from internal/bench/baseline")
	f.StringVar(&o.Dir, "dir", "", "`folder` on the disk that the strict journal is measured on (default: the temporary folder)")
	f.StringVar(&o.Source, "source", ".", "root of the module")
	f.StringVar(&o.LogLevel, "log-level", "info", "Waybill's log level")
	f.DurationVar(&o.Window, "window", 0, "length of one measurement (default 800ms, quick 400ms)")
	f.DurationVar(&o.Warmup, "warmup", 0, "load before each measurement (default a quarter of the window)")
}

func measure(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("run", flag.ContinueOnError)
	o := bench.Options{Progress: os.Stderr}
	common(f, &o)
	size := f.String("size", string(bench.Standard), "quick (3 min), standard (20 min) or full (45 min)")
	f.StringVar(&o.Scenarios, "only", "", "`expression` over scenario names such as intercepted/1KiB/c16/keep-alive")
	f.StringVar(&o.Systems, "systems", "", "`expression` over system names; goproxy always runs")
	f.IntVar(&o.Rounds, "rounds", 0, "measurements of each system in each scenario (default 5)")
	f.BoolVar(&o.Syncs, "syncs", true, "count syncs under strace")
	f.BoolVar(&o.Probe, "probe", true, "measure the disk and the journal alone")
	f.StringVar(&o.Controls, "controls", "", "`path` of a build with the tag waybill_controls, to measure the leak guard")
	f.Func("compare", "`name=path` of another build of Waybill, to run as one more system; may be repeated", func(v string) error {
		name, path, ok := strings.Cut(v, "=")
		if !ok || name == "" || path == "" {
			return errors.New("want name=path")
		}
		if o.Compare == nil {
			o.Compare = make(map[string]string)
		}
		o.Compare[name] = path
		return nil
	})
	asJSON := f.Bool("json", false, "print JSON instead of tables")
	markdown := f.String("write", "", "also write the report to this Markdown `file`")
	note := f.String("note", "", "`text` to print beside the numbers, such as what else the machine did")
	command := f.String("command", "", "the command to name in the report")
	if err := parse(f, args); err != nil {
		return err
	}
	o.Size = bench.Size(*size)
	var err error
	if o.Self, err = os.Executable(); err != nil {
		return err
	}
	r, err := bench.Run(ctx, o)
	if err != nil {
		return err
	}
	r.Command = *command
	r.Note = strings.TrimSpace(*note + " " + r.Note)
	if *markdown != "" {
		var b bytes.Buffer
		r.Markdown(&b)
		if err := os.WriteFile(*markdown, b.Bytes(), 0o644); err != nil { // a page of the documentation
			return err
		}
	}
	if *asJSON {
		return r.JSON(os.Stdout)
	}
	r.Text(os.Stdout)
	return nil
}

func profile(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("profile", flag.ContinueOnError)
	o := bench.Options{Progress: os.Stderr}
	common(f, &o)
	mode := f.String("mode", string(bench.Intercepted), "intercepted or absolute")
	clients := f.String("clients", "1,16,64", "numbers of clients")
	out := f.String("out", "bin/bench/profiles", "`folder` for the profiles")
	bytes := f.Int("bytes", 1<<10, "`size` of the answers")
	fresh := f.Bool("new-conn", false, "a new connection for every request")
	if err := parse(f, args); err != nil {
		return err
	}
	if o.Window == 0 {
		o.Window = 4 * time.Second
	}
	var counts []int
	for s := range strings.SplitSeq(*clients, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return fmt.Errorf("-clients %q: numbers with commas between them", *clients)
		}
		counts = append(counts, n)
	}
	var err error
	if o.Self, err = os.Executable(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "wbb")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	o.Waybill = filepath.Join(dir, "waybill")
	if err := bench.BuildProfiled(ctx, o.Source, o.Waybill); err != nil {
		return err
	}
	if err := bench.Profile(ctx, o, bench.Scenario{Mode: bench.Mode(*mode), Bytes: *bytes, NewConn: *fresh}, counts, *out); err != nil {
		return err
	}
	fmt.Printf("profiles are in %s: go tool pprof -top %s\n", *out, filepath.Join(*out, fmt.Sprintf("%s-c%d-cpu.pprof", *mode, counts[len(counts)-1])))
	return nil
}

// parse reads the flags and refuses what is left over.
func parse(f *flag.FlagSet, args []string) error {
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			os.Exit(0)
		}
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return nil
}
