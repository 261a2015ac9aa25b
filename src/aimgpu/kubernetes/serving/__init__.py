"""The stack file on a cluster: each model becomes a Deployment (or an InferenceService) and a Service, with a share of a GPU.

Start at `manifests.render_stack` (pure) and `applier.StackApplier`. The gateway of `kubernetes.gateway` finds the models by the
labels and annotations that `model_labels` names. Not here: sizing and placement, which admission and kube-scheduler do.
"""
