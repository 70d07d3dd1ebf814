package launch

import "strings"

// Named is a launcher with the name under which configurations select it. The handles of its
// processes begin with the name and a colon, if it is a Keeper and not the default one of a ByKind.
type Named struct {
	Name string
	Launcher
}

// ByKind selects a launcher by the kind of the worker. It implements Keeper.
type ByKind struct {
	Default Launcher         // of kinds that are not in Kinds
	Kinds   map[string]Named // by Command.Kind
}

// Launch implements Launcher.
func (b ByKind) Launch(c Command) (Process, error) {
	if l, ok := b.Kinds[c.Kind]; ok {
		return l.Launch(c)
	}
	return b.Default.Launch(c)
}

// Adopt implements Keeper.
func (b ByKind) Adopt(handle string) (Process, error) {
	launcher := b.Default
	for _, l := range b.Kinds {
		if strings.HasPrefix(handle, l.Name+":") {
			launcher = l.Launcher
		}
	}
	if keeper, ok := launcher.(Keeper); ok {
		return keeper.Adopt(handle)
	}
	return nil, ErrGone
}
