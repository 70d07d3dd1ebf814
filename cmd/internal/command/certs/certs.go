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

const certsLong = `Manage the certificates with which services, workers and people authenticate each other.

They are issued by a certificate authority. Create it once with init, keep its key in one place, and copy its certificate (ca.pem)
to every host. Issued certificates are short-lived and are renewed in place; processes load renewed files without a restart. For
details see docs/security.md.`

const certsExample = `  rollout certs init
  rollout certs issue service control --host control.internal
  rollout certs issue worker gpu
  rollout certs issue person ada
  rollout certs renew --all
  rollout certs show`

// Command returns `rollout certs`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("certs", "Manage TLS certificates", initCommand(env), issueCommand(env), renewCommand(env), showCommand(env))
	cmd.Long, cmd.Example = certsLong, certsExample
	return cmd
}

// folderFlag adds --dir and returns a function that opens the folder.
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
				return cert.Folder{}, cli.Usage("the folder of the certificates is not known: set --dir or HOME")
			}
			path = filepath.Join(home, "rollout", "certs")
		}
		path, err := filepath.Abs(path)
		return cert.Folder{Path: path, Now: env.Now}, err
	}
}

// checkDays limits the validity to what a time.Duration can hold.
func checkDays(days uint) error {
	if days == 0 {
		return cli.Usage("invalid argument 0 for --days: must be at least 1")
	}
	if days > mostDays {
		return cli.Usage("invalid argument %d for --days: must be at most %d", days, mostDays)
	}
	return nil
}

func initCommand(env *cli.Env) *cobra.Command {
	var name string
	var days uint
	cmd := &cobra.Command{
		Use: "init", Short: "Create a certificate authority", Args: cobra.NoArgs,
		Long: `Create a certificate authority: ca.pem, which every host needs, and ca-key.pem, which issues certificates and must be kept private.
An existing authority is not overwritten.`,
		Example: "  rollout certs init\n  rollout certs init --dir /etc/rollout/certs --name \"training cluster\"",
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().StringVar(&name, "name", "rollout", "`name` of the authority")
	cmd.Flags().UintVar(&days, "days", authorityDays, "validity in days")
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
		env.Note("created the authority %s; keep %s private", f.CAFile(), f.CAKeyFile())
		return writeTable(env, f, []cert.Files{{Cert: f.CAFile(), Key: f.CAKeyFile(), CA: f.CAFile()}})
	}
	return cmd
}

func issueCommand(env *cli.Env) *cobra.Command {
	var hosts []string
	var days uint
	cmd := &cobra.Command{
		Use: "issue service|worker|person NAME", Short: "Issue a certificate", Args: cobra.ExactArgs(2),
		Long: `Issue a certificate and its key, KIND-NAME.pem and KIND-NAME-key.pem. Certificates of services and workers are valid for this host
(localhost, 127.0.0.1, ::1 and its name) and for the hosts of --host. The certificate of a person is only valid as a client.`,
		Example: `  rollout certs issue service control --host control.internal --host 10.0.0.7
  rollout certs issue worker gpu --days 7
  rollout certs issue person ada`,
		ValidArgs: []string{"service", "worker", "person"},
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().StringArrayVar(&hosts, "host", nil, "`host` name or address that the certificate is also valid for; can be repeated")
	cmd.Flags().UintVar(&days, "days", issuedDays, "validity in days")
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
		Use: "renew [KIND-NAME...]", Short: "Renew certificates in place",
		Long: `Renew certificates for the same hosts, with new keys, in the same files. Without names, renew those that expire soon; run this daily.
Processes load the new files at their next connection.`,
		Example: `  rollout certs renew
  rollout certs renew service-control
  rollout certs renew --all --days 7`,
	}
	folder := folderFlag(env, cmd)
	cmd.Flags().UintVar(&days, "days", issuedDays, "validity in days")
	cmd.Flags().UintVar(&within, "within", 10, "without names: renew certificates that expire within this number of days")
	cmd.Flags().BoolVar(&all, "all", false, "renew all certificates of the folder")
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
			env.Note("no certificate in %s expires within %d days", f.Path, within)
		}
		return writeTable(env, f, renewed)
	}
	return cmd
}

// due returns the named certificates, or those to renew.
func due(env *cli.Env, f cert.Folder, names []string, all bool, within time.Duration) (chosen []cert.Identity, err error) {
	if all && len(names) > 0 {
		return nil, cli.Usage("--all cannot be combined with names: %s", strings.Join(names, " "))
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

// thisMachine returns the names and addresses of this host.
func thisMachine() []string {
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	if name, err := os.Hostname(); err == nil && name != "" && !slices.Contains(hosts, name) {
		hosts = append(hosts, name)
	}
	return hosts
}
