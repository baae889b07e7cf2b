"""Spans through a ring of slots, for memory that the other process cannot store into: that of a device.

Theory. The target makes a ring of host memory for each source that needs one: a few slots, each with a table
of the spans in it. Both processes map it, and pin their mapping where a device copies from or to it. The
source gathers a slot-full of spans into a free slot and, when the copy is complete, says so over a socket of
the ring's own; the target checks the table against what it granted, scatters the slot into its region and,
when that is complete, gives the slot back. So a slot that came back is the target's word that its bytes are
in place: a batch is Done when all of its slots came back, and a batch that was given up is quiet then.

Nothing here waits for the other end but for slots, and nothing waits for a device but a thread inside the
wait of one event. A fence that is a CUDA event goes to the stream that reads the source. Since streams keep
their order, so do the fences of one connection: a batch waits for those submitted before it.

The source never has the region itself mapped, only the ring. A target therefore enforces grants on this path,
and its word about a peer is Quiet as soon as the slots that it took are scattered, alive as that peer may be.
"""
