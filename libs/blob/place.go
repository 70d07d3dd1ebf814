package blob

import "fmt"

// Place is what errors of a store behind a network say of it.
type Place struct {
	Endpoint string // "": that of the provider
	Bucket   string
	Access   string // where the credentials come from, for people; "" if that is not known
}

func (p Place) String() string {
	if p.Endpoint == "" {
		return fmt.Sprintf("the object store (bucket %q)", p.Bucket)
	}
	return fmt.Sprintf("the object store %s (bucket %q)", p.Endpoint, p.Bucket)
}

// Denied is ErrDenied of an operation on a blob. why is the answer of the store. The message has
// all, because it is what a run that fails shows.
func (p Place) Denied(op, key, why string) error {
	from := ""
	if p.Access != "" {
		from = " (" + p.Access + ")"
	}
	return ErrDenied.WithMessage("%s refused the credentials%s to %s %s: %s", p, from, op, key, why).With("bucket", p.Bucket).
		Fix("correct the credentials of the bucket" + from + ", or what they may do: read, create, list and delete its objects; rolloutd reads them at its start, so start it again")
}

// Silent is ErrUnavailable of an operation on a blob.
func (p Place) Silent(op, key string, err error) error {
	return ErrUnavailable.WithMessage("%s does not answer to %s %s: %v", p, op, key, err).
		Fix("check that the object store runs and that this host reaches it (blob.endpoint, `rollout doctor`); what failed is tried again")
}
