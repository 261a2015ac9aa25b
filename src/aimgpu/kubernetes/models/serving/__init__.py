"""The stack file on a cluster: each model becomes a Deployment (or an InferenceService) and a Service, with a share of a GPU.

A program becomes a Job or a Deployment. Start at `manifests.render_stack` (pure) and `applier.StackApplier`. The gateway of
`models.gateway` finds the models by the labels and annotations of `vocabulary.model_labels`. Not here: sizing and placement,
which admission and kube-scheduler do.
"""
