package audit

// epochCheck counts prompts by epoch, and finds prompts without a required record. It visits the
// positions in order.
type epochCheck struct {
	*index
	*findings
	next    uint64 // the next position to count
	end     uint64 // after the last one
	settled uint64 // every position before it must have a record
}

func newEpochCheck(x *index, f *findings) *epochCheck {
	c := &epochCheck{index: x, findings: f, next: x.config.GetFirstPosition(), end: x.end(x.Run.GetPlan().GetConfig().GetTrain().GetSteps())}
	c.settled = c.next
	if c.positional() {
		c.settled = c.index.end(c.Ledger.GetState().GetStep())
	}
	if c.dynamic() { // the end of the last step is not known in advance, so groups may remain
		c.end = max(c.end, c.CursorAfter)
	} else if c.succeeded() && !c.stopped() {
		c.settled = c.end
	}
	return c
}

// prompt counts a position, and those without rows before it.
func (c *epochCheck) prompt(p *Prompt) {
	if c.Unscheduled {
		c.recorded(p)
		return
	}
	c.absent(p.Position)
	if p.Position == c.next && c.next < c.end {
		c.position(p)
		c.next++
	}
}

// finish counts the positions after the last one that has rows.
func (c *epochCheck) finish() {
	if !c.Unscheduled {
		c.absent(c.end)
	}
}

// absent counts the positions before one: they have no rows.
func (c *epochCheck) absent(before uint64) {
	for ; c.next < min(before, c.end); c.next++ {
		c.position(&Prompt{Position: c.next})
	}
}

func (c *epochCheck) position(at *Prompt) {
	p, g := at.Position, at.group()
	switch count := c.epoch(p); {
	case g.GetState() == consumed:
		count.Consumed++
		return
	case g.GetState() == excluded:
		count.Excluded++
		return
	case p < c.CursorAfter:
		count.InFlight++
	default:
		count.NotIssued++
	}
	switch {
	case p >= c.settled:
	case g == nil:
		c.add(Break{Group: c.name(p)}, "GROUP_MISSING", "position %d has no record: the prompt was skipped, or its record is lost", p)
	case c.succeeded() && !c.stopped():
		c.add(c.ofGroup(g), "NOT_CONSUMED", "the run succeeded, but the group is %s", stateName(g))
	}
}

// recorded counts the records by epoch: which prompts another program will still send is unknown.
func (c *epochCheck) recorded(p *Prompt) {
	if p.group() == nil {
		return
	}
	switch count := c.epoch(p.Position); p.group().GetState() {
	case consumed:
		count.Consumed++
	case excluded:
		count.Excluded++
	default:
		count.InFlight++
	}
}

// epoch returns the counts of the epoch of a position.
func (c *epochCheck) epoch(position uint64) *Epoch {
	all := &c.report.Epochs
	if e := position / c.config.GetRows(); len(*all) == 0 || (*all)[len(*all)-1].Epoch != e {
		*all = append(*all, Epoch{Epoch: e})
	}
	return &(*all)[len(*all)-1]
}
