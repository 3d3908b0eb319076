"""What pgoutput sends, without what is empty: the reference for walrider_pgoutput, from the messages alone."""

import struct

CHANGES = b"IUDTRYM"


def _xid_after(message, offset):
    return struct.unpack_from(">I", message, offset)[0]


class Trimmed:
    """The messages of decoding sessions of one slot, one session after another."""

    def __init__(self):
        self.prepared = {}              # whether the subscriber has it, by xid
        self.fresh = set()              # those whose PREPARE came in this session

    def session(self, messages):
        """What is to be sent of these."""
        self.fresh = set()
        self.streams, self.result, pending, inside = {}, [], [], None
        for message in messages:
            kind = message[:1]
            if kind in (b"b", b"S"):
                inside, pending = kind, [message]
            elif inside and kind in b"O":
                pending.append(message)
            elif inside and kind in CHANGES:
                pending.append(message)
            elif inside == b"b" and kind == b"P":
                self._prepared(_xid_after(message, 26), len([m for m in pending if m[:1] in CHANGES]) > 0, [*pending, message])
                inside = None
            elif inside == b"S" and kind == b"E":
                self._chunk(pending, message)
                inside = None
            else:
                assert not inside or kind == b"M", (inside, kind)
                if self._passes(kind, message):
                    self.result.append(message)
        return self.result

    def _prepared(self, xid, published, messages):
        self.prepared[xid] = published
        self.fresh.add(xid)
        if published:
            self.result += messages

    def _chunk(self, pending, stop):
        xid = _xid_after(pending[0], 1)
        changes = [message for message in pending if message[:1] in CHANGES]
        # After a restart pgoutput streams what the subscriber has prepared already, and never ends that.
        if changes and xid not in self.prepared:
            known = self.streams.get(xid)
            start = pending[0][:5] + (b"\0" if known else b"\1")
            self.result += [start, *pending[1:], stop]
            self.streams.setdefault(xid, set()).update({xid}, (_xid_after(change, 1) for change in changes))

    def _passes(self, kind, message):
        if kind == b"K":
            return self.prepared.pop(_xid_after(message, 26))
        if kind == b"r":
            xid = _xid_after(message, 34)
            # One of an earlier session is not looked at again: the subscriber ignores what it does not know.
            return self.prepared.pop(xid, True) or xid not in self.fresh
        if kind == b"c":
            return self.streams.pop(_xid_after(message, 1), None) is not None
        if kind == b"p":
            xid = _xid_after(message, 26)
            self.prepared[xid] = self.streams.pop(xid, None) is not None
            self.fresh.add(xid)
            return self.prepared[xid]
        if kind == b"A":
            top, sub = _xid_after(message, 1), _xid_after(message, 5)
            known = self.streams.get(top, set())
            if top == sub:
                self.streams.pop(top, None)
            passes = sub in known
            known.discard(sub)
            return passes
        return True
