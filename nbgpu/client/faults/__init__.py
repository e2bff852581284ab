"""Faults of ranks as the notebook sees them: deaths, hangs, mismatched collectives, and the recovery.

The list says what each fault leads to. For cells `cells/cell.py` and `recovery.Recovery.restore_group`
decide, for runs `runs/watch.py`; both learn of failures and deaths from `watch.RankWatch`.

Some words that the modules share: ranks are 'freed' when the connections of their process groups are cut
('severed'), so that a collective in which they wait raises at once. A rank is 'back' when it has replied,
'gone' when its process has ended, and 'stuck' when it has not replied although it was freed and interrupted.

- A rank raises. Cell: the others are freed from their collectives, the group is formed again unless nothing
  has disturbed it, and the cell raises RankError. Run: the same, and the run ends as failed.
- A rank's process ends. Cell: it is replaced by an empty rank, and the cell raises RankError. Run: it is
  replaced, and training goes on (`RunWatch._heal`). The run fails instead if all ranks ended, another rank
  raised for a reason of its own, or ranks ended more than `_MAX_DEATHS_WITHOUT_PROGRESS` times at one step.
- A rank's process ends between two cells. It is replaced before the next cell or run, which is not sent
  (`Recovery.make_ready`).
- A rank does not come back although it was freed and interrupted. Cell: it is abandoned, and no cell is sent
  until it is back or restarted (`Recovery.abandon_cell`). Run: it is ended and replaced where another rank
  has died (`RunWatch._heal`); else the run fails, and the rank is abandoned.
- A host is lost. `on_host_lost` decides in `lost_hosts.LostHosts.go_on`. Cell: the next one waits for the
  host ("wait"), runs on the other ranks ("shrink") or is refused ("stop"). Run: with "wait" it pauses until
  the host is back, with "shrink" it begins again from its newest checkpoint on fewer ranks; with "stop", and
  where hosts do not see its folder, it fails (`RunWatch._can_heal`, `_heal`).
- Ranks wait for one that does not come (a hang). Cell and run: a notice says so (`hangs.HangWatch`), and the
  person decides. A Stop interrupts a cell; in a run it interrupts the step if ranks hang, and the run ends
  with a checkpoint (`RunWatch._must_interrupt`, `_end_in_order`).
- A collective takes longer than `collective_timeout_s`. The rank itself leaves the group and raises
  (`engine/group/collective_timeout.py`); then as for a rank that raises.
- Ranks call different collectives, with `debug`. As for a rank that raises, with each rank's call named
  (`mismatches.explained`).
"""
