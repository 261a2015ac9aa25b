{{- define "aim.image" -}}
{{- $_ := required "image.repository is not set: no image is published. Build one (docker build --file deploy/docker/Dockerfile .), push it where the nodes can pull it, and set image.repository to its name" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* resource.k8s.io/v1, which the DRA driver writes. Not asked of the server: `helm template` has none to ask. */}}
{{- define "aim.hasClaims" -}}
{{- if semverCompare ">=1.34.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{- define "aim.onOpenShift" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end -}}
{{- end -}}

{{- /* What the agent may do on its node: no more than the layouts need that it may change. SYS_PTRACE is for the watchdog, which
looks at the open files of tenants' processes; SYS_ADMIN for MIG instances and compute modes, SYS_MODULE for the reload of the
driver that a memory mode takes. */}}
{{- define "aim.agentCapabilities" -}}
- SYS_PTRACE
- DAC_OVERRIDE
- FOWNER
- CHOWN
{{- if has .Values.agent.layouts (list "compute" "memory") }}
- SYS_ADMIN
{{- end }}
{{- if eq .Values.agent.layouts "memory" }}
- SYS_MODULE
{{- end }}
{{- end -}}

{{- define "aim.labels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "aim-gpu-sharing" }}
app.kubernetes.io/part-of: aim-gpu-sharing
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "aim.monitoringLabels" -}}
{{ include "aim.labels" . }}
{{- with .Values.serviceMonitor.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "aim.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "aim.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- if not (include "aim.onOpenShift" .) }}{{/* which gives each namespace users of its own */}}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "aim.rbac" -}}
{{- $name := printf "aim-gpu-sharing-%s" .component -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "aim.labels" .root | nindent 4 }}
  {{- with (index .root.Values .component).serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- $everywhere := .root.Files.Get (printf "files/cluster-rules-%s.yaml" .component) }}
{{- $namespaced := .root.Files.Get (printf "files/namespaced-rules-%s.yaml" .component) }}
{{- $places := (index .root.Values .component).watchNamespaces | default list }}
{{- if not $places }}
{{- $everywhere = print $everywhere $namespaced }}
{{- end }}
{{- if $everywhere }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- include "aim.labels" .root | nindent 4 }}
rules: {{- $everywhere | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- include "aim.labels" .root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
{{- range $place := $places }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}-watched
  namespace: {{ $place }}
  labels: {{- include "aim.labels" $.root | nindent 4 }}
rules: {{- $namespaced | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}-watched
  namespace: {{ $place }}
  labels: {{- include "aim.labels" $.root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}-watched}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $.root.Release.Namespace }}}
{{- end }}
{{- $rules := .root.Files.Get (printf "files/rules-%s.yaml" .component) }}
{{- if $rules }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "aim.labels" .root | nindent 4 }}
rules: {{- tpl $rules .root | nindent 2 }}
{{- if and (eq .component "admission") .root.Values.admission.certManager.enabled }}
{{- .root.Files.Get "files/rules-admission-cert-manager.yaml" | nindent 2 }}
{{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "aim.labels" .root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
{{- end -}}

{{- /* `over` into `base`: maps are merged key by key, lists are appended, everything else replaces what was there. */}}
{{- define "aim.merge" -}}
{{- $merged := deepCopy .base -}}
{{- range $key, $value := .over -}}
{{- $had := get $merged $key -}}
{{- if and (kindIs "map" $had) (kindIs "map" $value) -}}
{{- $_ := set $merged $key (include "aim.merge" (dict "base" $had "over" $value) | fromYaml) -}}
{{- else if and (kindIs "slice" $had) (kindIs "slice" $value) -}}
{{- $_ := set $merged $key (concat $had $value) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{- /* The Deployment or DaemonSet of a component, with what its values `pod` and `container` add. */}}
{{- define "aim.workload" -}}
{{- $values := index .root.Values .component -}}
{{- $workload := include (printf "aim.%s" .component) .root | fromYaml -}}
{{- with $workload.Error }}{{ fail . }}{{ end -}}
{{- $template := $workload.spec.template -}}
{{- $pod := deepCopy $values.pod -}}
{{- $metadata := dict -}}
{{- range $key := list "annotations" "labels" -}}
{{- with get $pod $key }}{{ $_ := set $metadata $key . }}{{ end -}}
{{- $_ := unset $pod $key -}}
{{- end -}}
{{- $container := include "aim.merge" (dict "base" (first $template.spec.containers) "over" $values.container) | fromYaml -}}
{{- $_ := set $template.spec "containers" (list $container) -}}
{{- $_ := set $template "spec" (include "aim.merge" (dict "base" $template.spec "over" $pod) | fromYaml) -}}
{{- $_ := set $template "metadata" (include "aim.merge" (dict "base" $template.metadata "over" $metadata) | fromYaml) -}}
{{- toYaml $workload -}}
{{- end -}}

{{- /* How callers outside the cluster reach the Service of a component: an Ingress, an HTTPRoute of the Gateway API, or neither. */}}
{{- define "aim.entry" -}}
{{- $name := printf "aim-gpu-sharing-%s" .component -}}
{{- $root := .root -}}
{{- $port := .port -}}
{{- with (index .root.Values .component).ingress }}
{{- $host := .host }}
{{- if .enabled }}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  rules:
    - host: {{ required "ingress.host: the name that callers use" .host | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend: {service: {name: {{ $name }}, port: {number: {{ $port }}}}}
  {{- with .tlsSecret }}
  tls:
    - hosts: [{{ $host | quote }}]
      secretName: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
{{- with (index .root.Values .component).httpRoute }}
{{- if .enabled }}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
spec:
  parentRefs: {{- toYaml (required "httpRoute.parentRefs: the Gateways that take its traffic" (.parentRefs | default nil)) | nindent 4 }}
  {{- with .hostnames }}
  hostnames: {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - backendRefs:
        - {name: {{ $name }}, port: {{ $port }}}
      timeouts: {request: 0s}   # answers of models are streams
{{- end }}
{{- end }}
{{- end -}}

{{- /* A Job of Helm's, `hook`, that runs `module` with the rights of files/cluster-rules-NAME.yaml. `deletePolicy`: of all of it. */}}
{{- define "aim.hook" -}}
{{- $name := printf "aim-gpu-sharing-%s" .name -}}
{{- $hook := dict "helm.sh/hook" .hook "helm.sh/hook-delete-policy" .deletePolicy -}}
{{- $root := .root -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
  annotations: {{- toYaml $hook | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
  annotations: {{- toYaml $hook | nindent 4 }}
rules: {{- $root.Files.Get (printf "files/cluster-rules-%s.yaml" .name) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
  annotations: {{- toYaml $hook | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $root.Release.Namespace }}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "aim.labels" $root | nindent 4 }}
  annotations: {{- toYaml (merge (dict "helm.sh/hook-weight" "1") $hook) | nindent 4 }}
spec:
  backoffLimit: 2
  activeDeadlineSeconds: 300  # as long as Helm waits by default; the image may have to be pulled
  template:
    metadata:
      labels: {{- include "aim.selector" (dict "root" $root "component" .name) | nindent 8 }}
    spec:
      serviceAccountName: {{ $name }}
      restartPolicy: Never
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      tolerations:
        - operator: Exists
      containers:
        - name: {{ .name }}
          image: {{ include "aim.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -m, {{ .module }}]
          resources:
            requests: {cpu: 10m, memory: 64Mi}
            limits: {memory: 256Mi}
          securityContext: {{- include "aim.restricted" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
      volumes:
        - {name: tmp, emptyDir: {medium: Memory}}
{{- end -}}
