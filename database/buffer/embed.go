// Package buffer is the schema of the buffer service: one database for all runs.
package buffer

import "embed"

// Migrations holds the goose migrations, a folder a dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
