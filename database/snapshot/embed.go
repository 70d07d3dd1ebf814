// Package snapshot holds the schema of the snapshot service.
package snapshot

import "embed"

// Migrations are goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
