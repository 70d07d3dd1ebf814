package certs

import (
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/cert"
)

func showCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show", Short: "Show the certificates of the folder", Args: cobra.NoArgs,
		Long:    "Show the certificates of the folder: names, hosts, expiry and problems. To check the certificates in rolloutd.toml use rollout doctor.",
		Example: "  rollout certs show\n  rollout certs show --dir /etc/rollout/certs --format json",
	}
	folder := folderFlag(env, cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		f, err := folder()
		if err != nil {
			return err
		}
		issued, err := f.Issued()
		if err != nil {
			return err
		}
		var list []cert.Files
		if _, err := os.Stat(f.CAFile()); err == nil {
			list = append(list, cert.Files{Cert: f.CAFile(), CA: f.CAFile()})
		}
		for _, id := range issued {
			list = append(list, files(f, id))
		}
		return writeTable(env, f, list)
	}
	return cmd
}

// certJSON is a certificate in JSON output.
type certJSON struct {
	Name  string    `json:"name"`
	Cert  string    `json:"cert_file"`
	Key   string    `json:"key_file"`
	CA    string    `json:"ca_file"`
	Hosts []string  `json:"hosts"`
	Ends  time.Time `json:"ends"`
	Wrong string    `json:"wrong,omitempty"`
}

func writeTable(env *cli.Env, f cert.Folder, list []cert.Files) error {
	now, rows := env.Now(), []certJSON{}
	for _, c := range list {
		row := certJSON{Name: strings.TrimSuffix(filepath.Base(c.Cert), ".pem"), Cert: c.Cert, Key: c.Key, CA: c.CA, Hosts: []string{}}
		leaf, err := checkCert(f, c, now)
		if leaf != nil {
			row.Ends, row.Hosts = leaf.NotAfter.UTC(), append(row.Hosts, cert.Hosts(leaf)...)
		}
		if err != nil {
			row.Wrong = err.Error()
		}
		rows = append(rows, row)
	}
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"folder": f.Path, "certificates": rows})
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("NAME"), s.Bold("EXPIRES"), s.Bold("LEFT"), s.Bold("HOSTS"), s.Bold("STATE"))
	for _, r := range rows {
		state := s.Green("good")
		if r.Wrong != "" {
			state = s.Red(r.Wrong)
		}
		table.Row(r.Name, env.Time(r.Ends), fmt.Sprintf("%d d", max(0, r.Ends.Sub(now).Round(day)/day)), strings.Join(r.Hosts, " "), state)
	}
	if len(rows) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(env.Stdout, "%sin %s\n", table.String(), f.Path)
	return err
}

// checkCert checks a certificate. The key of the authority may be on another host.
func checkCert(f cert.Folder, c cert.Files, now time.Time) (*x509.Certificate, error) {
	if c.Cert != f.CAFile() {
		return cert.Check(c, now)
	}
	list, err := cert.Read(c.Cert)
	if err != nil {
		return nil, err
	}
	if now.After(list[0].NotAfter) {
		return list[0], cert.ErrExpired
	}
	if info, err := os.Stat(f.CAKeyFile()); err == nil && info.Mode().Perm()&0o077 != 0 {
		return list[0], cert.ErrFile.WithMessage("other users can read %s", f.CAKeyFile())
	}
	return list[0], nil
}
