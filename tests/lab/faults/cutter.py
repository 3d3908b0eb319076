"""A proxy that looks into what a walsender sends, and cuts the connection right behind a chosen message of the stream."""

import socket
import struct
import threading

SENT_DATA = b"dw"           # a CopyData with XLogData in it, against keepalives


class Cutter:
    """In front of a server's unix socket; connect to 127.0.0.1 and `port` instead.

    It counts what streams pass from `arm(number)` on. Right behind that message the connection is cut, once: nothing that the
    server sends later arrives, and nothing from the client either.
    """

    def __init__(self, server):
        self.address = f"{server.sockets}/.s.PGSQL.{server.port}"
        self.lock = threading.Lock()
        self.left = self.cuts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, number):
        """Cut behind that message, from 1 on."""
        with self.lock:
            self.left, self.cuts = number, 0

    def disarm(self):
        """Let everything pass; whether it has cut since it was armed."""
        with self.lock:
            self.left = 0
            return self.cuts > 0

    def close(self):
        """No new connections."""
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return          # closed
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self.address)
            except OSError:
                client.close()  # the server is not there now, as its own port would say
                continue
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    @staticmethod
    def _shut(*sockets):
        for one in sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass            # the other direction's thread was here already

    def _up(self, client, server):
        """As it comes."""
        try:
            while data := client.recv(65536):
                server.sendall(data)
        except OSError:
            pass                # cut
        self._shut(client, server)

    def _down(self, server, client):
        """Message by message. A server's messages all have a type and a length: no encryption is asked for."""
        pending = b""
        try:
            while data := server.recv(65536):
                pending += data
                at = 0
                while len(pending) >= at + 5 and len(pending) >= at + (length := 1 + struct.unpack_from(">I", pending, at + 1)[0]):
                    if self._counts(pending[at:at + 1] + pending[at + 5:at + 6]) and self._is_last():
                        client.sendall(pending[:at + length])
                        return
                    at += length
                client.sendall(pending[:at])
                pending = pending[at:]
        except OSError:
            pass                # cut
        finally:
            self._shut(server, client)

    def _counts(self, head):
        """Whether a message is one of those that are counted: its type, and the first byte after its length."""
        return head == SENT_DATA

    def _is_last(self):
        """One more message passes: whether it is the chosen one."""
        with self.lock:
            if not self.left:
                return False
            self.left -= 1
            self.cuts += self.left == 0
            return self.left == 0


class AnswerCutter(Cutter):
    """In front of a server that executes statements: it counts those that are done, COMMIT among them."""

    def _counts(self, head):
        return head[:1] == b"C"
