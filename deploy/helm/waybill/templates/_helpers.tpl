{{- define "waybill.labels" -}}
app.kubernetes.io/name: waybill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "waybill.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- define "waybill.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- define "waybill.grace" -}}
{{ add .Values.drainSeconds .Values.preStopSeconds 10 }}
{{- end }}
{{- define "waybill.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{/* The proxy's container, of both forms; a list of listen addresses is given as .listen. */}}
{{- define "waybill.container" -}}
name: waybill
image: {{ include "waybill.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [serve, --log-format, json, --proxy, {{ printf "%s:7171" .listen | quote }}, --metrics, "0.0.0.0:7174", --drain, {{ printf "%ds" (int .root.Values.drainSeconds) }}]
ports:
  - {name: proxy, containerPort: 7171}
  - {name: metrics, containerPort: 7174}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 1
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
securityContext:
  runAsUser: 65532
  runAsGroup: 65532
  {{- include "waybill.restricted" . | nindent 2 }}
resources:
  requests: {cpu: {{ .root.Values.resources.cpu }}, memory: {{ .root.Values.resources.memory }}}
  limits: {memory: {{ .root.Values.resources.memoryLimit }}}
volumeMounts:
  - {name: data, mountPath: /var/lib/waybill}
  - {name: tmp, mountPath: /tmp}
  - {name: config, mountPath: /etc/waybill, readOnly: true}
  {{- if .root.Values.secretName }}
  - {name: secrets, mountPath: /run/waybill/secrets, readOnly: true}
  {{- end }}
{{- end }}
{{- define "waybill.volumes" -}}
- name: tmp
  emptyDir: {}
- name: config
  configMap: {name: {{ include "waybill.name" . }}-config}
{{- if .Values.secretName }}
- name: secrets
  secret: {secretName: {{ .Values.secretName }}, defaultMode: 0440}
{{- end }}
{{- end }}
