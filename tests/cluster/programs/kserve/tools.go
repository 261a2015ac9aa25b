//go:build tools

// Package programs names what is built, so that go.mod keeps its requirements.
package programs

import (
	_ "github.com/kserve/kserve/cmd/llmisvc"
	_ "github.com/kserve/kserve/cmd/manager"
	_ "knative.dev/serving/cmd/controller"
	_ "knative.dev/serving/cmd/queue"
	_ "knative.dev/serving/cmd/webhook"
)
