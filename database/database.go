// Package database is the schema of every service: one folder a service, with its goose migrations
// embedded.
//
//	database/<service>/embed.go              package <service>; //go:embed sqlite/*.sql postgres/*.sql; var Migrations embed.FS
//	database/<service>/sqlite/00001_*.sql    applied by DB.Migrate(ctx, <service>.Migrations) of libs/sqldb
//	database/<service>/postgres/00001_*.sql  the same tables for PostgreSQL
//
// A migration that was released is never edited; a change is a further file, of the same number in
// both folders. Text sorts by its bytes in both: in PostgreSQL by COLLATE "C".
package database
