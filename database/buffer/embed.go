// Package buffer contains the database schema of the buffer service.
package buffer

import "embed"

// Migrations are the goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
