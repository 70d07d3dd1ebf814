// Package certs has the commands `rollout certs ...`.
package certs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/libs/cert"
)

const (
	day           = 24 * time.Hour
	authorityDays = 3650
	mostDays      = 36500
	issuedDays    = 30
)

const certsLong = `Make the certificates with which services, workers and people show each other who they are.

An authority issues them: made once by init, its key stays in one place, its certificate (ca.pem) goes to every host. What it issues
lives for days, and is renewed in place; who uses the files takes the new ones without a restart. docs/security.md has the rest.`

const certsExample = `  rollout certs init
  rollout certs issue service control --host control.internal
  rollout certs issue worker gpu
  rollout certs issue person ada
  rollout certs renew --all
  rollout certs show`

// Command returns `rollout certs`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("certs", "Make, renew and show the certificates of a mesh", initCommand(env), issueCommand(env), renewCommand(env), showCommand(env))
	cmd.Long, cmd.Example = certsLong, certsExample
	return cmd
}

// folderFlag adds the flag that all of them have.
func folderFlag(env *cli.Env, cmd *cobra.Command) func() (cert.Folder, error) {
	dir := cmd.Flags().String("dir", "", "`folder` of the certificates (default: $XDG_CONFIG_HOME/rollout/certs, else ~/.config/rollout/certs)")
	return func() (cert.Folder, error) {
		path := *dir
		if path == "" {
			home := env.Getenv("XDG_CONFIG_HOME")
			if home == "" && env.Getenv("HOME") != "" {
				home = filepath.Join(env.Getenv("HOME"), ".config")
			}
			if home == "" {
				return cert.Folder{}, cli.Usage("no folder: name one with --dir, or set HOME")
			}
			path = filepath.Join(home, "rollout", "certs")
		}
		path, err := filepath.Abs(path)
		return cert.Folder{Path: path, Now: env.Now}, err
	}
}

// checkDays keeps within what a duration holds: more would make a certificate that ended long ago.
func checkDays(days uint) error {
	if days == 0 {
		return cli.Usage("invalid argument 0 for --days: it lives for one day at least")
	}
	if days > mostDays {
		return cli.Usage("invalid argument %d for --days: it lives for %d days at most", days, mostDays)
	}
	return nil
}

func initCommand(env *cli.Env) *cobra.Command {
	var name string
	var days uint
	cmd := &cobra.Command{
		Use: "init", Short: "Make an authority", Args: cobra.NoArgs,
		Long: `Make an authority: ca.pem, which every host needs, and ca-key.pem, which only issues certificates and belongs to nobody else.
One that is there already is never overwritten.`,
		Example: "  rollout certs init\n  rollout certs init --dir /etc/rollout/certs --name \"training cluster\"",
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().StringVar(&name, "name", "rollout", "`name` of the authority, for people")
	cmd.Flags().UintVar(&days, "days", authorityDays, "how many days it lives")
	cmd.RunE = func(*cobra.Command, []string) error {
		f, err := folder()
		if err != nil {
			return err
		}
		if err := checkDays(days); err != nil {
			return err
		}
		if _, err := f.Init(name, time.Duration(days)*day); err != nil {
			return err
		}
		env.Note("made the authority %s; keep %s to yourself", f.CAFile(), f.CAKeyFile())
		return writeTable(env, f, []cert.Files{{Cert: f.CAFile(), Key: f.CAKeyFile(), CA: f.CAFile()}})
	}
	return cmd
}

func issueCommand(env *cli.Env) *cobra.Command {
	var hosts []string
	var days uint
	cmd := &cobra.Command{
		Use: "issue service|worker|person NAME", Short: "Issue a certificate", Args: cobra.ExactArgs(2),
		Long: `Issue a certificate and its key, KIND-NAME.pem and KIND-NAME-key.pem in the folder. Those of services and workers are for this
machine (localhost, 127.0.0.1, ::1 and its name) and the hosts that --host names: what others call them by. A person's only calls.`,
		Example: `  rollout certs issue service control --host control.internal --host 10.0.0.7
  rollout certs issue worker gpu --days 7
  rollout certs issue person ada`,
		ValidArgs: []string{"service", "worker", "person"},
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().StringArrayVar(&hosts, "host", nil, "`host` name or address that it is for, besides this machine's; as often as needed")
	cmd.Flags().UintVar(&days, "days", issuedDays, "how many days it lives")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		f, err := folder()
		if err != nil {
			return err
		}
		if err := checkDays(days); err != nil {
			return err
		}
		id := cert.Identity{Kind: cert.Kind(args[0]), Name: args[1]}
		if id.Kind != cert.Person {
			hosts = append(thisMachine(), hosts...)
		}
		if _, err := f.Issue(id, hosts, time.Duration(days)*day); err != nil {
			return err
		}
		return writeTable(env, f, []cert.Files{files(f, id)})
	}
	return cmd
}

func renewCommand(env *cli.Env) *cobra.Command {
	var days, within uint
	var all bool
	cmd := &cobra.Command{
		Use: "renew [KIND-NAME...]", Short: "Issue certificates anew, in place",
		Long: `Issue certificates anew for the same hosts, with new keys, in place of the old ones. Without names those that end soon, so that it
can run each day; processes that use the files take the new ones at their next connection.`,
		Example: `  rollout certs renew
  rollout certs renew service-control
  rollout certs renew --all --days 7`,
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().UintVar(&days, "days", issuedDays, "how many days they live")
	cmd.Flags().UintVar(&within, "within", 10, "without names: those that end within so many days")
	cmd.Flags().BoolVar(&all, "all", false, "every certificate of the folder")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		f, err := folder()
		if err != nil {
			return err
		}
		if err := checkDays(days); err != nil {
			return err
		}
		chosen, err := due(env, f, args, all, time.Duration(within)*day)
		if err != nil {
			return err
		}
		var renewed []cert.Files
		for _, id := range chosen {
			if _, err := f.Renew(id, time.Duration(days)*day); err != nil {
				return err
			}
			renewed = append(renewed, files(f, id))
		}
		if len(renewed) == 0 {
			env.Note("none of %s ends within %d days", f.Path, within)
		}
		return writeTable(env, f, renewed)
	}
	return cmd
}

// due is the certificates that were named, or those to renew.
func due(env *cli.Env, f cert.Folder, names []string, all bool, within time.Duration) (chosen []cert.Identity, err error) {
	if all && len(names) > 0 {
		return nil, cli.Usage("--all stands alone, here it stands with %s", strings.Join(names, " "))
	}
	for _, n := range names {
		kind, name, _ := strings.Cut(n, "-")
		chosen = append(chosen, cert.Identity{Kind: cert.Kind(kind), Name: name})
	}
	if len(names) > 0 {
		return chosen, nil
	}
	issued, err := f.Issued()
	for _, id := range issued {
		list, readErr := cert.Read(f.CertFile(id))
		if readErr != nil {
			return nil, readErr
		}
		if all || env.Now().Add(within).After(list[0].NotAfter) {
			chosen = append(chosen, id)
		}
	}
	return chosen, err
}

func files(f cert.Folder, id cert.Identity) cert.Files {
	return cert.Files{Cert: f.CertFile(id), Key: f.KeyFile(id), CA: f.CAFile()}
}

// thisMachine is what processes of one host call each other by.
func thisMachine() []string {
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	if name, err := os.Hostname(); err == nil && name != "" && !slices.Contains(hosts, name) {
		hosts = append(hosts, name)
	}
	return hosts
}
