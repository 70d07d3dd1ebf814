// Package gateway holds the schema of the rollout-gateway service.
package gateway

import "embed"

// Migrations are goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
