#!/usr/bin/env python3
"""Draws the panels of deploy/grafana/waybill.json from a real Prometheus that scraped the demo: docs/dashboard.png.

Grafana itself is not used: the picture shows the dashboard's own queries and legends, not its look, and says so.
Needs prometheus and rsvg-convert (Debian: prometheus, librsvg2-bin).   scripts/dashboard.py [SECONDS]
"""
import html
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

root = pathlib.Path(__file__).resolve().parent.parent
seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 150
COLORS = ["#5794f2", "#73bf69", "#f2495c", "#ff9830", "#b877d9", "#fade2a", "#8ab8ff", "#37872d", "#c4162a", "#e0b400", "#a352cc", "#96d98d"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(prometheus, path, **query):
    with urllib.request.urlopen(f"http://127.0.0.1:{prometheus}/api/v1/{path}?" + urllib.parse.urlencode(query), timeout=20) as r:
        return json.load(r)["data"]["result"]


def fill(expr, span):
    for name, value in (("$__rate_interval", "20s"), ("$__range", f"{span}s"), ("$job", ".*"), ("$instance", ".*"), ("$route", ".*")):
        expr = expr.replace(name, value)
    return expr


def legend(text, labels):
    for k, v in labels.items():
        text = text.replace("{{" + k + "}}", v)
    return text or ", ".join(v for v in labels.values()) or "value"


def number(v, unit):
    if unit == "s":
        return f"{v * 1000:.3g} ms" if abs(v) < 1 else f"{v:.3g} s"
    if unit in ("bytes", "Bps"):
        for u in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(v) < 1024 or u == "TiB":
                return f"{v:.3g} {u}"
            v /= 1024
    return f"{v:.3g}" + ("/s" if unit == "ops" else "")


class Picture:
    def __init__(self):
        self.parts = []

    def text(self, x, y, s, size=11, fill="#d8d9da", anchor="start", weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(s)}</text>')

    def rect(self, x, y, w, h, fill, stroke="none"):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="{stroke}"/>')


def chart(p, x, y, w, h, lines, unit, start, end, stack):
    names = list(lines)
    if not names:
        p.text(x + w / 2, y + h / 2, "no data", 11, "#7b7f86", "middle")
        return
    times = sorted({t for values in lines.values() for t, _ in values})
    base = dict.fromkeys(times, 0.0)
    tops = []
    for n in names:
        own = dict(lines[n])
        if stack:
            base = {t: base[t] + own.get(t, 0.0) for t in times}
            tops.append(dict(base))
        else:
            tops.append(own)
    high = max([v for top in tops for v in top.values()] + [1e-9]) * 1.05
    rows = min(len(names), 4)
    plot = h - 24 - 14 * ((rows + 1) // 2)
    px = lambda t: x + 48 + (w - 56) * (t - start) / (end - start)
    py = lambda v: y + plot - plot * v / high
    for i in range(4):
        v = high * i / 3
        p.parts.append(f'<line x1="{x + 48}" x2="{x + w - 8}" y1="{py(v):.1f}" y2="{py(v):.1f}" stroke="#2c3235"/>')
        p.text(x + 44, py(v) + 3, number(v, unit), 9, "#9fa7b3", "end")
    for i in reversed(range(len(names))):
        color = COLORS[i % len(COLORS)]
        pts = [(px(t), py(v)) for t, v in sorted(tops[i].items())]
        d = " ".join(f"{a:.1f},{b:.1f}" for a, b in pts)
        if stack and len(pts) > 1:
            p.parts.append(f'<polygon points="{pts[0][0]:.1f},{y + plot:.1f} {d} {pts[-1][0]:.1f},{y + plot:.1f}" fill="{color}" fill-opacity="0.85"/>')
        else:
            p.parts.append(f'<polyline points="{d}" fill="none" stroke="{color}" stroke-width="1.4"/>')
    for i, n in enumerate(names[:rows * 2]):
        lx, ly = x + 10 + (i % 2) * (w / 2 - 4), y + plot + 20 + 14 * (i // 2)
        p.rect(lx, ly - 7, 9, 3, COLORS[i % len(COLORS)])
        p.text(lx + 13, ly - 2, n[: int(w / 2 / 5.6)], 9.5, "#c7d0d9")


def panel(p, spec, x, y, w, h, prometheus, start, end):
    p.rect(x, y, w, h, "#181b1f", "#25292e")
    p.text(x + 8, y + 16, spec["title"], 12, "#e8e9ea", weight="bold")
    unit = spec["fieldConfig"]["defaults"].get("unit", "short")
    span = int(end - start)
    inner = (x + 4, y + 28, w - 8, h - 32)
    if spec["type"] == "timeseries":
        lines = {}
        for t in spec["targets"]:
            for s in ask(prometheus, "query_range", query=fill(t["expr"], span), start=start, end=end, step=2):
                values = [(a, float(b)) for a, b in s["values"] if b not in ("NaN", "+Inf", "-Inf")]
                if values and any(v for _, v in values):
                    lines[legend(t["legendFormat"], s["metric"])] = values
        lines = dict(sorted(lines.items(), key=lambda kv: -sum(v for _, v in kv[1]))[:10])
        stack = spec["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
        chart(p, *inner, lines, unit, start, end, stack)
        return
    rows = []
    for t in spec["targets"]:
        for s in ask(prometheus, "query", query=fill(t["expr"], span), time=end):
            rows.append((legend(t["legendFormat"], s["metric"]), s["metric"], float(s["value"][1])))
    if spec["type"] == "stat":
        label = "  ".join(number(v, unit) for _, _, v in rows[:2]) or "no data"
        color = "#d8d9da"
        for step in spec["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", []):
            if rows and (step["value"] is None or rows[0][2] >= step["value"]):
                color = {"green": "#73bf69", "red": "#f2495c"}[step["color"]]
        p.text(x + w / 2, y + h / 2 + 14, label, 34 if h > 120 else 24, color, "middle", "bold")
    elif spec["type"] == "bargauge":
        high = max([v for _, _, v in rows] + [1e-9])
        for i, (name, _, v) in enumerate(rows[:7]):
            p.rect(x + 8, y + 34 + i * 24, max((w - 16) * v / high, 2), 16, "#3d6ba8")
            p.text(x + 14, y + 46 + i * 24, f"{name}  {number(v, unit)}", 10.5)
    else:
        keys = [k for k in ("route", "phase", "outcome", "retry", "code", "version", "revision", "goversion") if any(k in m for _, m, _ in rows)]
        for j, k in enumerate(keys):
            p.text(x + 10 + j * (w - 80) / max(len(keys), 1), y + 36, k, 10, "#8ab8ff", weight="bold")
        for i, (_, m, v) in enumerate(rows[: int((h - 44) / 15)]):
            for j, k in enumerate(keys):
                p.text(x + 10 + j * (w - 80) / len(keys), y + 51 + i * 15, m.get(k, "")[:30], 9.5)
            p.text(x + w - 10, y + 51 + i * 15, number(v, unit), 9.5, anchor="end")


def draw(prometheus, start, end, out):
    spec = json.loads((root / "deploy/grafana/waybill.json").read_text())
    unit_x, unit_y, top = 60, 26, 46
    p = Picture()
    height = top
    for s in spec["panels"]:
        g = s["gridPos"]
        x, y, w, h = g["x"] * unit_x + 8, top + g["y"] * unit_y, g["w"] * unit_x - 6, g["h"] * unit_y - 6
        height = max(height, y + h + 12)
        if s["type"] == "row":
            p.text(x, y + 16, "▾ " + s["title"], 13, "#c7d0d9", weight="bold")
        else:
            panel(p, s, x, y, w, h, prometheus, start, end)
    width = 24 * unit_x + 12
    head = Picture()
    head.rect(0, 0, width, height, "#111217")
    head.text(10, 28, "Waybill", 20, "#ffffff", weight="bold")
    head.text(width - 10, 20, "Drawn by scripts/dashboard.py from a real Prometheus that scraped “waybill demo”, run again and again.", 10.5, "#9fa7b3", "end")
    head.text(width - 10, 35, "The queries are those of deploy/grafana/waybill.json; this is not a screenshot of Grafana.", 10.5, "#9fa7b3", "end")
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="DejaVu Sans, Arial, sans-serif">' + "".join(head.parts + p.parts) + "</svg>"
    subprocess.run(["rsvg-convert", "-o", str(out)], input=svg.encode(), check=True)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        binary = os.environ.get("WAYBILL") or tmp + "/waybill"
        if "WAYBILL" not in os.environ:
            subprocess.run(["go", "build", "-o", binary, "./cmd/waybill"], cwd=root, check=True, env={**os.environ, "CGO_ENABLED": "0"})
        meters, prometheus = free_port(), free_port()
        pathlib.Path(tmp, "prometheus.yml").write_text(
            f"global: {{scrape_interval: 1s}}\nscrape_configs:\n  - job_name: waybill\n    static_configs: [{{targets: ['127.0.0.1:{meters}']}}]\n")
        server = subprocess.Popen(["prometheus", f"--config.file={tmp}/prometheus.yml", f"--storage.tsdb.path={tmp}/tsdb", f"--web.listen-address=127.0.0.1:{prometheus}", "--log.level=error"])
        try:
            start = time.time()
            while time.time() - start < seconds:
                subprocess.run([binary, "demo", "--metrics", f"127.0.0.1:{meters}"], check=False, stdout=subprocess.DEVNULL)
            end = time.time()
            out = root / "docs/dashboard.png"
            draw(prometheus, max(start, end - seconds), end, out)
            print(out)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


if __name__ == "__main__":
    main()
