"""The tables of the stress: one per access method, one with all of them, and what asks each index.

In an expression `$g` stands for the row's id and `$r` for a number drawn for the statement, so that the
seed determines every row; in a condition `$n` stands for any number.
"""

from dataclasses import dataclass


def draw(salt, limit):
    """An SQL expression: 0 <= n < limit, determined by the row, the statement and a salt."""
    return f"((hashint8extended($g::bigint, $r::bigint + {salt}) & 2147483647) % {limit})::int"


def fill(text, g="id", r="0", n="0"):
    """Put names or numbers in the place of `$g`, `$r` and `$n`."""
    return text.replace("$g", str(g)).replace("$r", str(r)).replace("$n", str(n))


@dataclass(frozen=True)
class Index:
    """`CREATE INDEX name ON table definition`, and conditions that only its table's rows decide."""

    name: str
    method: str
    definition: str
    conditions: tuple
    unique: bool = False

    def create(self, table, name=None, concurrently=""):
        """The statement that makes it, perhaps under another name."""
        return (f"CREATE {'UNIQUE ' if self.unique else ''}INDEX {concurrently}{name or self.name} ON {table} "
                f"USING {self.method} {self.definition}")


@dataclass(frozen=True)
class Table:
    """Columns beside `id` and `pad` as {name: (type, expression)}; `rows` is the range of ids."""

    name: str
    method: str
    rows: int
    bulk: int
    columns: dict
    indexes: tuple
    options: str = ""
    pad: str = "repeat('p', 20)"
    persistence: str = ""
    constraint: str = ""
    unique: bool = False        # an insert may meet a row that is there: COPY cannot be used
    keys_change: bool = True    # an update of the indexed columns never violates a constraint

    def expressions(self, g, r):
        """The values of a new row, in the order of `column_names`."""
        return ", ".join([str(g)] + [fill(expression, g, r) for _, expression in self.columns.values()]
                         + [fill(self.pad, g, r)])

    def column_names(self):
        """All columns."""
        return ", ".join(["id", *self.columns, "pad"])

    def create(self):
        """The statements that make the table, empty, with its indexes."""
        columns = ", ".join(f"{name} {kind}" for name, (kind, _) in self.columns.items())
        options = f" WITH ({self.options})" if self.options else ""
        made = [f"CREATE {self.persistence} TABLE {self.name} (id int, {columns}, pad text{self.constraint}){options}",
                f"ALTER TABLE {self.name} ALTER pad SET STORAGE PLAIN"]
        made += [index.create(self.name) for index in self.indexes if index.definition]
        return ";\n".join(made) + ";\n"

    def insert(self, start, count, r):
        """Rows of a range of ids; on conflict nothing, where rows are unique."""
        skip = " ON CONFLICT DO NOTHING" if self.unique else ""
        return (f"INSERT INTO {self.name} ({self.column_names()}) SELECT {self.expressions('g', r)} "
                f"FROM generate_series({start}, {start} + {count} - 1) g{skip}")

    def update_keys(self, r):
        """`UPDATE table SET` every column but the id; the caller adds WHERE."""
        changes = ", ".join(f"{name} = {fill(expression, 'id', r)}" for name, (_, expression) in self.columns.items())
        return f"UPDATE {self.name} SET {changes}"


WORD = f"substr(md5(({draw(91, 300)})::text), 1, 6)"
WORDS = f"concat_ws(' ', {WORD}, {WORD.replace('91', '92')}, {WORD.replace('91', '93')}, md5($g::text || $r::text))"
ARRAY = f"ARRAY[{draw(1, 12)}, 20 + {draw(2, 300)}, 1000 + $g % 500]"
POINT = f"CASE WHEN {draw(3, 9)} = 0 THEN NULL WHEN $r % 2 = 0 THEN point($g % 997, $g / 10.0) " \
        f"ELSE point({draw(4, 40)}, {draw(5, 2000)}) END"
BOX = f"box(point($g % 500, {draw(6, 500)}), point($g % 500 + {draw(7, 9)}, {draw(6, 500)} + {draw(8, 9)}))"
RANGE = f"CASE {draw(9, 12)} WHEN 0 THEN 'empty'::int4range WHEN 1 THEN NULL WHEN 2 THEN int4range($g, NULL) " \
        f"ELSE int4range($g, $g + 1 + {draw(10, 60)}) END"
ADDRESS = f"('10.' || {draw(11, 4)} || '.' || $g % 250 || '.' || {draw(12, 250)} || " \
          f"CASE {draw(13, 3)} WHEN 0 THEN '/24' ELSE '' END)::inet"
# Rows of one statement have a long beginning in common, which others then break at any place.
PATH = f"CASE {draw(14, 4)} WHEN 0 THEN left('walrider/' || md5(($r % 90)::text), {draw(15, 40)}) " \
       f"WHEN 1 THEN 'walrider/' || $g % 50 ELSE md5(($r % 90)::text) || left(md5($g::text), {draw(16, 30)}) END " \
       f"|| repeat('z', {draw(17, 20)})"
LONG = f"left(repeat(md5($g::text || $r::text), 1 + {draw(18, 20)}), 40 + {draw(19, 500)})"
DOCUMENT = f"jsonb_build_object('k', {draw(20, 30)}, 'w', {WORD}, 'l', jsonb_build_array($g % 100, {draw(21, 9)}))"

BTREE = Table("sb", "btree", 9000, 900, {
    "k": ("int", draw(30, 25)), "v": ("int", f"CASE {draw(31, 10)} WHEN 0 THEN NULL ELSE {draw(32, 100000)} END"),
    "f": ("float8", f"$g + {draw(33, 1000)} / 7.0"), "t": ("text", LONG)}, (
    Index("sb_id", "btree", "(id) INCLUDE (v)", ("id >= $n % 9000", "id = $n % 9000"), unique=True),
    Index("sb_k", "btree", "(k)", ("k = $n % 25", "k > $n % 25")),
    Index("sb_kv", "btree", "(k, v DESC NULLS LAST) WITH (deduplicate_items = off, fillfactor = 50)",
          ("k = $n % 25 AND v < 50000", "k <= $n % 25")),
    Index("sb_t", "btree", "(t)", ("t > to_hex($n % 16)", "t < 'abc'")),
    Index("sb_expression", "btree", "(lower(left(t, 9)), id DESC)", ("lower(left(t, 9)) > to_hex($n % 16)",)),
    Index("sb_partial", "btree", "(v) WHERE k < 8", ("k < 8 AND v BETWEEN $n % 90000 AND $n % 90000 + 9000",)),
    Index("sb_kf", "btree", "(k DESC, f) WITH (fillfactor = 70)", ("k = $n % 25 AND f > 3000",))),
    options="fillfactor = 80", unique=True)


def some_of(column):
    """A condition that only an index on the column answers quickly: any of some hundreds of values of table `sh`."""
    return f"{column} = ANY (ARRAY(SELECT DISTINCT {column} FROM sh ORDER BY {column} OFFSET $n % 50 LIMIT 300))"


HASH = Table("sh", "hash", 6000, 700, {
    "k": ("int", draw(40, 20)), "u": ("bigint", draw(41, 100000)), "t": ("text", f"md5({draw(42, 3000)}::text)")}, (
    Index("sh_id", "btree", "(id)", ("id < $n % 6000",)),
    Index("sh_k", "hash", "(k)", ("k = $n % 20", "k = 3")),
    Index("sh_u", "hash", "(u) WITH (fillfactor = 20)", (some_of("u"),)),
    Index("sh_t", "hash", "(t)", (some_of("t"),)),
    Index("sh_partial", "hash", "(id) WHERE k < 10", ("k < 10 AND " + some_of("id"),))))

GIN = Table("sg", "gin", 4000, 300, {
    "a": ("int[]", f"CASE {draw(50, 20)} WHEN 0 THEN NULL WHEN 1 THEN '{{}}' ELSE {ARRAY} END"),
    "j": ("jsonb", DOCUMENT), "v": ("tsvector", f"to_tsvector('simple', {WORDS})"), "t": ("text", WORDS),
    "k": ("int", draw(51, 15))}, (
    Index("sg_id", "btree", "(id)", ("id < $n % 4000",)),
    Index("sg_a", "gin", "(a) WITH (fastupdate = off)",
          ("a @> ARRAY[$n % 12]", "a && ARRAY[$n % 12, 1000 + $n % 500]")),
    Index("sg_a_fast", "gin", "(a) WITH (gin_pending_list_limit = 64)",
          ("a @> ARRAY[$n % 12]", "a <> '{5}' AND a @> '{5}'")),
    Index("sg_j", "gin", "(j)", ("""j @> '{"k": 3}'""", "j ? 'w' AND id < 500", """j @> '{"l": [7]}'""")),
    Index("sg_path", "gin", "(j jsonb_path_ops) WITH (fastupdate = off)",
          ("""j @> '{"k": 3}'""", """j @@ '$.k == 4'""")),
    Index("sg_v", "gin", "(v)", ("v @@ to_tsquery('simple', substr(md5(($n % 300)::text), 1, 6))",)),
    Index("sg_t", "gin", "(t gin_trgm_ops) WITH (fastupdate = off)",
          ("t LIKE '%abc%'", "t LIKE '%' || to_hex(256 + $n % 3000) || '%'")),
    Index("sg_many", "gin", "(k, a)", ("k = $n % 15 AND a @> '{4}'", "k = $n % 15")),
    Index("sg_partial", "gin", "((a || k)) WHERE k > 7", ("k > 7 AND (a || k) @> '{9}'",))))

# Posting trees of several levels: few keys, very many rows.
TREE = Table("st", "gin", 50000, 9000, {
    "a": ("int[]", f"ARRAY[1, 2 + $g % 3, 10 + {draw(52, 30)}]"), "k": ("smallint", "$g % 2")}, (
    Index("st_id", "btree", "(id)", ("id < $n % 50000",)),
    Index("st_a", "gin", "(a) WITH (fastupdate = off)",
          ("a @> '{1}'", "a @> ARRAY[2 + $n % 3]", "a @> ARRAY[10 + $n % 30]")),
    Index("st_k", "gin", "(k) WITH (gin_pending_list_limit = 256)", ("k = 0::smallint", "k = 1::smallint"))),
    pad="''")

GIST = Table("ss", "gist", 7000, 500, {
    "p": ("point", POINT), "b": ("box", BOX), "r": ("int4range", RANGE), "i": ("inet", ADDRESS),
    "v": ("tsvector", f"to_tsvector('simple', {WORDS})"), "t": ("text", WORDS), "k": ("int", draw(60, 30))}, (
    Index("ss_id", "btree", "(id)", ("id < $n % 7000",)),
    Index("ss_p", "gist", "(p)", ("p <@ box '((0,0),(300,900))'", "p << point(500, 0)")),
    Index("ss_p_buffered", "gist", "(p) WITH (buffering = on, fillfactor = 50)",
          ("p <@ circle(point($n % 900, 300), 200)",)),
    Index("ss_b", "gist", "(b)", ("b && box(point(0, 0), point($n % 500, 300))", "b <@ '((0,0),(200,200))'::box")),
    Index("ss_r", "gist", "(r)", ("r && int4range($n % 7000, $n % 7000 + 900)", "r @> $n % 7000", "r = 'empty'")),
    Index("ss_i", "gist", "(i inet_ops)", ("i << '10.1.0.0/16'", "i >>= '10.2.3.4'")),
    Index("ss_v", "gist", "(v)", ("v @@ to_tsquery('simple', substr(md5(($n % 300)::text), 1, 6))",)),
    Index("ss_t", "gist", "(t gist_trgm_ops)", ("t LIKE '%abc%'", "t LIKE '%' || to_hex(256 + $n % 3000) || '%'")),
    Index("ss_kp", "gist", "(k, p) INCLUDE (id)", ("k = $n % 30", "k < 5 AND p << point(500, 0)")),
    Index("ss_partial", "gist", "(circle(p, 2)) WHERE k < 9",
          ("k < 9 AND circle(p, 2) && circle(point(100, 100), 90)",))))

# Rows may not overlap: each insert looks for those that do, and most find one.
EXCLUSION = Table("sx", "gist", 3000, 150, {
    "k": ("int", draw(61, 6)), "r": ("int4range", f"int4range($g, $g + 1 + {draw(62, 4)})")}, (
    Index("sx_id", "btree", "(id)", ("id < $n % 3000",)),
    Index("sx_exclusion", "gist", "", ("k = $n % 6", "r && int4range($n % 3000, $n % 3000 + 500)"))),
    constraint=", CONSTRAINT sx_exclusion EXCLUDE USING gist (k WITH =, r WITH &&)", unique=True, keys_change=False)

SPGIST = Table("sp", "spgist", 7000, 600, {
    "p": ("point", POINT), "q": ("point", f"point($g / 10.0, {draw(70, 700)})"), "t": ("text", PATH),
    "i": ("inet", ADDRESS), "r": ("int4range", RANGE), "b": ("box", BOX)}, (
    Index("sp_id", "btree", "(id)", ("id < $n % 7000",)),
    Index("sp_p", "spgist", "(p)", ("p <@ box '((0,0),(300,900))'", "p IS NULL", "p << point(500, 0)")),
    Index("sp_q", "spgist", "(q kd_point_ops) WITH (fillfactor = 60)", ("q <@ box '((0,0),(300,900))'",)),
    Index("sp_t", "spgist", "(t)", ("t ^@ ('walrider/' || $n % 50)", "t > '5' AND t < 'walrider/3'")),
    Index("sp_i", "spgist", "(i)", ("i << '10.1.0.0/16'",)),
    Index("sp_r", "spgist", "(r)", ("r && int4range($n % 7000, $n % 7000 + 900)", "r @> $n % 7000")),
    Index("sp_root", "spgist", "(t) WHERE id % 1000 = 7", ("id % 1000 = 7 AND t ^@ 'walrider/'",)),
    Index("sp_b", "spgist", "(b) INCLUDE (id)", ("b && box(point(0, 0), point($n % 500, 300))",))))

BRIN = Table("sr", "brin", 9000, 900, {
    "n": ("int", f"CASE {draw(80, 30)} WHEN 0 THEN {draw(81, 9000)} ELSE $g END"),
    "t": ("text", f"left(repeat(md5($g::text), 8), {draw(82, 250)})"), "i": ("inet", ADDRESS), "r": ("int4range", RANGE)}, (
    Index("sr_id", "btree", "(id)", ("id < $n % 9000",)),
    Index("sr_n", "brin", "(n) WITH (pages_per_range = 1, autosummarize = on)",
          ("n BETWEEN $n % 9000 AND $n % 9000 + 99", "n < 50")),
    Index("sr_t", "brin", "(t, n) WITH (pages_per_range = 2)", ("t = left(md5('7'), 3)", "t > 'f' AND n < 800")),
    Index("sr_multi", "brin", "(n int4_minmax_multi_ops, id int4_minmax_multi_ops) WITH (pages_per_range = 4)",
          ("n BETWEEN $n % 9000 AND $n % 9000 + 99",)),
    Index("sr_bloom", "brin", "(n int4_bloom_ops, t text_bloom_ops) WITH (pages_per_range = 8)", ("n = $n % 9000",)),
    Index("sr_inclusion", "brin", "(r, i inet_inclusion_ops) WITH (pages_per_range = 1)",
          ("r && int4range($n % 9000, $n % 9000 + 99)", "i << '10.1.0.0/16'"))),
    pad=f"repeat('p', 1200 + {draw(83, 300)})")

BLOOM = Table("sm", "bloom", 6000, 700, {
    "a": ("int", draw(85, 50)), "b": ("int", draw(86, 500)), "t": ("text", WORD)}, (
    Index("sm_id", "btree", "(id)", ("id < $n % 6000",)),
    Index("sm_ab", "bloom", "(a, b, t) WITH (length = 80, col1 = 2)", ("a = $n % 50", "a = $n % 50 AND b = $n % 500")),
    Index("sm_partial", "bloom", "(b) WHERE a < 20", ("a < 20 AND b = $n % 500",))))

EVERYTHING = Table("se", "", 3000, 250, {
    "k": ("int", draw(95, 40)), "p": ("point", POINT), "a": ("int[]", ARRAY), "t": ("text", PATH)}, (
    Index("se_id", "btree", "(id)", ("id < $n % 3000",), unique=True),
    Index("se_k", "btree", "(k, t)", ("k = $n % 40",)),
    Index("se_hash", "hash", "(k)", ("k = $n % 40",)),
    Index("se_gin", "gin", "(a)", ("a @> ARRAY[$n % 12]",)),
    Index("se_gist", "gist", "(p)", ("p <@ box '((0,0),(300,900))'",)),
    Index("se_spgist", "spgist", "(t)", ("t ^@ 'walrider/'",)),
    Index("se_brin", "brin", "(id, k) WITH (pages_per_range = 1, autosummarize = on)", ("id BETWEEN 50 AND 90",)),
    Index("se_bloom", "bloom", "(k)", ("k = $n % 40",))),
    options="fillfactor = 60", unique=True)

HEAP = Table("so", "heap", 1500, 60, {
    "n": ("int", draw(98, 1000)),
    "t": ("text", f"(SELECT string_agg(md5(i::text || $g || $r), '') FROM generate_series(1, 8 * {draw(99, 12)}) i)")}, (
    Index("so_id", "btree", "(id)", ("id < $n % 1500",)),),
    options="fillfactor = 40, toast_tuple_target = 512")

UNLOGGED = Table("su", "btree", 2000, 200, {"k": ("int", draw(88, 30)), "t": ("text", WORDS)}, (
    Index("su_id", "btree", "(id)", ("id < $n % 2000",)), Index("su_k", "btree", "(k)", ("k = $n % 30",))),
    persistence="UNLOGGED")

TABLES = (HEAP, BTREE, UNLOGGED, HASH, GIN, TREE, GIST, EXCLUSION, SPGIST, BRIN, BLOOM, EVERYTHING)
METHODS = ("heap", "btree", "hash", "gin", "gist", "spgist", "brin", "bloom")
EXTENSIONS = ("amcheck", "bloom", "btree_gin", "btree_gist", "pageinspect", "pg_trgm", "pg_visibility")
