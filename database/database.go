// Package database is the schema of every service: one folder a service, with its goose migrations embedded.
//
//	database/<service>/embed.go            package <service>; //go:embed sqlite/*.sql; var Migrations embed.FS
//	database/<service>/sqlite/00001_*.sql  applied by sqldb.Migrate(ctx, db, <service>.Migrations, "sqlite")
//
// A migration that was released is never edited; a change is a further file. Folders of other dialects stand beside sqlite.
package database
