"""A small object store that speaks as much of S3's protocol as an archive needs, with faults: delays, errors, a bit that flips.

Objects live in this process.  Requests are noted, and how many fetched segments or archives at once.
"""

import hashlib
import re
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

BUCKET = "bucket"
GATHER_SECONDS = 20


class ObjectStore:
    """What is stored, and what goes wrong."""

    def __init__(self):
        self.objects = {}
        self.delay = 0.0                # seconds before any answer
        self.status = None              # answered to everything, if set
        self.refused = None             # whoever wants a range of an object with this in its name is refused
        self.cuts = 0                   # so many ranges are cut off in their middle
        self.tags = {}
        self.requests = []              # (method, key)
        self.most = self.running = 0
        self.gathered = 0               # a segment or archive is answered once so many are asked for at once, or GATHER_SECONDS later
        self.lock = threading.Condition()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.store = self
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self):
        """What a client's environment needs."""
        return dict(AWS_ENDPOINT=f"http://127.0.0.1:{self.server.server_address[1]}", AWS_ALLOW_HTTP="true",
                    AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")

    def url(self, prefix):
        """A place in it."""
        return f"s3://{BUCKET}/{prefix}"

    def flip(self, key, offset):
        """Turn a bit of an object over."""
        contents = bytearray(self.objects[key])
        contents[offset] ^= 0x10
        self.objects[key] = bytes(contents)

    def tag(self, key, contents):
        """What an object is told by."""
        known, tag = self.tags.get(key, (None, None))
        if known is not contents:
            tag = hashlib.md5(contents).hexdigest()
            self.tags[key] = contents, tag
        return f'"{tag}"'

    def is_cut(self):
        """Whether an answer is to be cut off."""
        with self.lock:
            is_due = self.cuts > 0
            self.cuts -= is_due
            return is_due

    def asked(self, method, part=""):
        """Keys that were asked for so, with this in their name."""
        with self.lock:
            return [key for how, key in self.requests if how == method and part in key]

    def close(self):
        """Answer nobody any more."""
        self.server.shutdown()
        self.server.server_close()

    @contextmanager
    def counted(self, method, key):
        """While a request is answered."""
        counts = method == "GET" and key.endswith((".zst", ".tar"))
        with self.lock:
            self.requests.append((method, key))
            self.running += counts
            self.most = max(self.most, self.running)
            self.lock.notify_all()
            if counts:
                self.lock.wait_for(lambda: self.most >= self.gathered, GATHER_SECONDS)
        try:
            time.sleep(self.delay)
            yield
        finally:
            with self.lock:
                self.running -= counts


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that was killed is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def answer(self, status, body=b"", cut=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])

    def error(self, status, code):
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def handle_request(self):
        store = self.server.store
        url = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with store.counted(self.command, key or query.get("prefix", "")):
            if store.status:
                self.error(store.status, "Broken")
            elif bucket != BUCKET:
                self.error(404, "NoSuchBucket")
            else:
                getattr(self, f"on_{self.command.lower()}")(store, key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = handle_request

    def on_get(self, store, key, query, _body):
        if not key:
            return self.on_list(store, query)
        contents = store.objects.get(key)
        if contents is None:
            return self.error(404, "NoSuchKey")
        about = dict(ETag=store.tag(key, contents), Last_Modified=formatdate(usegmt=True))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, contents, **about)
        if store.refused and store.refused in key:
            return self.error(403, "AccessDenied")
        first, last = int(wanted[1]), min(int(wanted[2]), len(contents) - 1)
        part = contents[first:last + 1]
        about["Content_Range"] = f"bytes {first}-{last}/{len(contents)}"
        self.close_connection = store.is_cut()
        return self.answer(206, part, cut=len(part) // 2 if self.close_connection else None, **about)

    on_head = on_get

    def on_put(self, store, key, _query, body):
        with store.lock:
            if self.headers.get("If-None-Match") == "*" and key in store.objects:
                return self.error(412, "PreconditionFailed")
            store.objects[key] = body
        return self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def on_post(self, store, _key, query, body):
        assert "delete" in query
        keys = [element.text for element in ElementTree.fromstring(body).iter() if element.tag.endswith("Key")]
        for key in keys:
            store.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def on_list(self, store, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        objects, prefixes = [], set()
        for key in sorted(store.objects):
            if key.startswith(prefix):
                rest = key[len(prefix):]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    objects.append(key)
        contents = "".join(f"<Contents><Key>{escape(key)}</Key><Size>{len(store.objects[key])}</Size>"
                           "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>" for key in objects)
        common = "".join(f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" for key in sorted(prefixes))
        self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>".encode())
