# Waybill as a container: one static binary, CA roots, nothing else. Build with
#   docker build --build-arg VERSION=v1.2.3 -t waybill .
# and run with a read-only root file system; only the volume is written:
#   docker run --read-only --cap-drop ALL --security-opt no-new-privileges \
#     -v waybill-data:/var/lib/waybill -v ./waybill.yaml:/etc/waybill/waybill.yaml:ro -p 127.0.0.1:7171:7171 waybill
# The volume holds the journal: what is on it says what was sent. It must be on a real disk.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
COPY internal/third_party internal/third_party
RUN go mod download
COPY . .
ARG VERSION=
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/waybill ./cmd/waybill \
 && mkdir -p /out/data && chmod 0700 /out/data

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build --chown=65532:65532 /out/data /var/lib/waybill
COPY --from=build /out/waybill /usr/local/bin/waybill
ENV WAYBILL_DATA=/var/lib/waybill WAYBILL_CONFIG=/etc/waybill/waybill.yaml PATH=/usr/local/bin
USER 65532:65532
WORKDIR /var/lib/waybill
VOLUME /var/lib/waybill
EXPOSE 7171 7174
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s CMD ["/usr/local/bin/waybill", "health"]
ENTRYPOINT ["/usr/local/bin/waybill"]
CMD ["serve", "--log-format", "json"]
