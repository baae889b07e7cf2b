"""What transports share whose bytes a foreign library moves.

Theory. Such a library writes into a peer's registered memory and says when it is done. It does not know who a
peer is, outlives the peer that it was meant for, reports an error while transfers of the same call go on, and
takes a deregistration to concern later writes alone. What it lacks is put beside it:

- *A library instance for each connection, at both ends.* The target's instance is opened for one invited peer
  and holds the regions granted to that peer, and nothing else. Closing it is what stops that peer, and stops
  nobody else: bytes on their way to it have nowhere to go.
- *A socket for each connection.* On it both ends prove themselves, the source asks for the regions that it
  wants to write and is told their addresses, and announces what has landed. It is the connection: the source
  looks at it before each part of a batch, and gives its library instance up when it breaks. The source closes
  it after its own library instance, so a hang-up, from a living source or a dead one, is that source's word
  that it writes no more.

So nothing is written to a dead target's successor: it cannot prove itself, it has other library instances,
and whoever was writing to the dead one has let go.

Where a source can write around the target's instance (NIXL copies with process_vm_writev between processes of
one kernel), closing that instance is not enough, and only the hang-up makes the peer quiet. Memory that such
a peer was told about is kept alive until then.
"""
