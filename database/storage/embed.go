// Package storage holds the schema of the storage service.
package storage

import "embed"

// Migrations are goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
