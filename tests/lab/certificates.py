"""Certificates for tests of TLS, made by openssl."""

import shutil

from tests.lab.server.cluster import run


def certificate(directory, name, subject, authority=None, *extensions):
    """NAME.key and NAME.crt in the directory, signed by an authority there or, without one, its own."""
    assert shutil.which("openssl"), "openssl is missing: install it"
    config = directory / "openssl.cnf"
    config.write_text("[req]\ndistinguished_name = name\n[name]\n")
    command = ["openssl", "req", "-config", config, "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", f"/CN={subject}", "-keyout", directory / f"{name}.key", "-out", directory / f"{name}.crt"]
    if authority:
        command += ["-CA", directory / f"{authority}.crt", "-CAkey", directory / f"{authority}.key"]
    for extension in extensions or [f"basicConstraints=critical,CA:{'FALSE' if authority else 'TRUE'}"]:
        command += ["-addext", extension]
    run(command)
    (directory / f"{name}.key").chmod(0o600)
