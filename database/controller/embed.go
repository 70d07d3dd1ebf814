// Package controller holds the schema of the learner-controller service.
package controller

import "embed"

// Migrations are goose migrations, one folder per dialect.
//
//go:embed sqlite/*.sql postgres/*.sql
var Migrations embed.FS
