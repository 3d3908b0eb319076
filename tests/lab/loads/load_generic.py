"""The mixed load's generic records, which extensions write: contrib/bloom is one that does."""


def generic(load):
    """A bloom index grows, loses tuples and whole pages, and uses these again; another is not logged."""
    load.sql("""
        CREATE EXTENSION IF NOT EXISTS bloom;
        CREATE TABLE sifted (id int, a int, b int, t text);
        CREATE INDEX sifted_a ON sifted USING bloom (a, b);
        CREATE INDEX sifted_long ON sifted USING bloom (a, b, t) WITH (length = 800, col1 = 5, col3 = 9);
        INSERT INTO sifted SELECT g, g % 1000, g % 77, md5(g::text || :seed) FROM generate_series(1, :rows / 2) g;
        CREATE INDEX sifted_later ON sifted USING bloom (t, a);
        DELETE FROM sifted WHERE id % 3 = 0; VACUUM sifted;
        UPDATE sifted SET b = b + 1 WHERE id % 10 = 1;
        DELETE FROM sifted WHERE id > :rows / 8; VACUUM sifted; VACUUM sifted;
    """)
    load.sql("CHECKPOINT")
    load.sql("""
        INSERT INTO sifted SELECT g, g % 99, g % 7, md5(g::text) FROM generate_series(1, :rows / 2) g;
        DELETE FROM sifted WHERE id % 2 = 0; VACUUM sifted;
        CREATE INDEX CONCURRENTLY sifted_concurrent ON sifted USING bloom (b); REINDEX INDEX sifted_a;
        CREATE UNLOGGED TABLE sifted_unlogged (a int); CREATE INDEX ON sifted_unlogged USING bloom (a);
        INSERT INTO sifted_unlogged SELECT generate_series(1, 1000); ALTER TABLE sifted_unlogged SET LOGGED;
        INSERT INTO sifted_unlogged SELECT generate_series(1, 1000);
    """)
