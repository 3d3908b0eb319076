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
            known = xid in self.streams
            start = pending[0][:5] + (b"\0" if known else b"\1")
            self.result += [start, *pending[1:], stop]
            self.streams.setdefault(xid, set()).update(_xid_after(change, 1) for change in changes)

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
            self.prepared[xid] = bool(self.streams.pop(xid, None))      # else it has been rolled back, and is aborted
            self.fresh.add(xid)
            return self.prepared[xid]
        if kind == b"A":
            top, sub = _xid_after(message, 1), _xid_after(message, 5)
            if top == sub:
                return self.streams.pop(top, None) is not None
            passes = sub in self.streams.get(top, ())
            self.streams.get(top, set()).discard(sub)
            return passes
        return True


class Lasting:
    """The same, of several sessions, less what was rolled back, and descriptions of relations. Of a transaction that has been
    rolled back by the time it is decoded, a session sends what it comes across before it looks into a catalog: how much that is
    depends on its caches.
    """

    def __init__(self):
        self.gone = set()

    def session(self, messages):
        """What lasts of these."""
        aborted = {_xid_after(message, 5) for message in messages if message[:1] == b"A"}
        aborted |= {_xid_after(message, 34) for message in messages if message[:1] == b"r"}
        result, streamed, block = [], set(), None
        for message in messages:
            kind = message[:1]
            if kind in (b"b", b"S"):
                block, xid = [message[:5] if kind == b"S" else message], _xid_after(message, 1 if kind == b"S" else 25)
            elif kind in (b"P", b"E"):
                if xid not in aborted and (kind == b"P" or len(block) > 1):
                    result += [*block, message]
                    streamed.add(xid)
                block = None
            elif block is not None:
                in_stream = block[0][:1] == b"S"
                if kind not in b"RYO" and not (in_stream and _xid_after(message, 1) in aborted):
                    block.append(message)
            elif kind == b"p" and _xid_after(message, 26) not in streamed - aborted:
                self.gone.add(_xid_after(message, 26))
            elif kind == b"c" and _xid_after(message, 1) not in streamed or kind == b"K" and _xid_after(message, 26) in self.gone:
                continue
            elif kind not in b"RYOAr":
                result.append(message)
        return result


def without_descriptions(messages):
    """Less RELATION and TYPE, which may come more often than needed."""
    return [message for message in messages if message[:1] not in b"RY"]


def undescribed(messages):
    """Changes of relations that the session has not described; what was streamed counts from its commit on."""
    known, streamed, top, missing = set(), {}, None, []
    for message in messages:
        kind = message[:1]
        if kind == b"S":
            top = _xid_after(message, 1)
        elif kind == b"E":
            top = None
        elif kind in (b"c", b"p"):
            known |= streamed.pop(_xid_after(message, 1 if kind == b"c" else 26), set())
        elif kind in b"RIUD":
            oid, own = _xid_after(message, 5 if top else 1), streamed.setdefault(top, set()) if top else known
            if kind == b"R":
                own.add(oid)
            elif oid not in known | own:
                missing.append(message)
    return missing
