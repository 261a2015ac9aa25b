//go:build tools

// Package programs names what is built, so that go.mod keeps its requirements.
package programs

import _ "sigs.k8s.io/kwok/cmd/kwok"
