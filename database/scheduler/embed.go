// Package scheduler holds the schema of the scheduler service.
package scheduler

import "embed"

// Migrations are goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
