"""kube-scheduler as an opponent: building it from Go modules, running it, reading what it measured."""
