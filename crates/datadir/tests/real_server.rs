//! This crate against PostgreSQL itself: `make test-datadir`, or as an unprivileged user
//! `PG_BINDIR=/usr/lib/postgresql/18/bin cargo test -p walrider-datadir --test real_server -- --ignored`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use walrider_datadir::backup_label::{BackupLabel, parse_tablespace_map};
use walrider_datadir::config::{Config, SignalFiles, set_auto_conf, write_recovery_signal};
use walrider_datadir::lock::DataDirLock;
use walrider_datadir::open::{SlruKind, read_control};
use walrider_datadir::timestamp::parse_timestamptz;
use walrider_datadir::twophase::TwoPhaseFiles;
use walrider_datadir::{DataDir, origins, relmap, slots};
use walrider_layout::Major;
use walrider_layout::control::{ControlFile, DbState};

/// A cluster of its own, stopped when dropped.
struct Server {
    dir: TempDir,
}

/// Through a shell and a second one: PostgreSQL takes a lock file that names its parent, or that of pg_ctl, for a stale
/// one, and the tests hold locks themselves.
fn run(program: &str, arguments: &[&str]) -> Output {
    let bindir = std::env::var("PG_BINDIR").expect("PG_BINDIR must name the directory of initdb, pg_ctl, psql");
    let program = Path::new(&bindir).join(program);
    let twice = "sh -c '\"$@\"; exit $?' sh \"$@\"; exit $?";
    let mut command = Command::new("sh");
    command.args(["-c", twice, "sh"]).arg(&program).args(arguments).env("LC_ALL", "C");
    command.output().expect("the program starts")
}

/// The server's major.
fn major() -> Major {
    let version = run_ok("postgres", &["--version"]);
    let number = version.split([' ', '.']).find_map(|word| word.parse().ok()).expect("a version");
    Major::from_number(number).expect("a supported major")
}

fn run_ok(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

impl Server {
    fn new(initdb_options: &[&str], settings: &str) -> Server {
        let server = Server { dir: tempfile::tempdir().unwrap() };
        let mut arguments = vec!["-D", server.data_str(), "-U", "postgres", "-A", "trust", "--no-sync", "--no-locale"];
        arguments.extend(initdb_options);
        run_ok("initdb", &arguments);
        let conf = server.data().join("postgresql.conf");
        let socket = server.dir.path().display();
        let more = format!("listen_addresses = ''\nunix_socket_directories = '{socket}'\n{settings}\n");
        fs::write(&conf, fs::read_to_string(&conf).unwrap() + &more).unwrap();
        server
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn data_str(&self) -> &'static str {
        self.data().to_str().unwrap().to_owned().leak()
    }

    fn start(&self) -> Output {
        let log = self.dir.path().join("log");
        run("pg_ctl", &["start", "-w", "-D", self.data_str(), "-l", log.to_str().unwrap(), "-o", "-F"])
    }

    fn start_ok(&self) {
        assert!(self.start().status.success(), "{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn stop(&self, mode: &str) {
        run_ok("pg_ctl", &["stop", "-w", "-D", self.data_str(), "-m", mode]);
    }

    fn sql(&self, sql: &str) -> String {
        let host = self.dir.path().to_str().unwrap();
        run_ok("psql", &["-XAtq", "-F", "|", "-h", host, "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-c", sql])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.data().join("postmaster.pid").exists() {
            run("pg_ctl", &["stop", "-w", "-D", self.data_str(), "-m", "immediate"]);
        }
    }
}

#[test]
#[ignore = "needs PostgreSQL"]
fn the_control_file_is_the_one_that_initdb_wrote() {
    // Pages carry checksums unless told otherwise since 18, and only if told so before.
    let other = if major() == Major::V17 { "--data-checksums" } else { "--no-data-checksums" };
    for options in [&["--wal-segsize=1"][..], &[other]] {
        let server = Server::new(options, "");
        let control = read_control(&server.data()).unwrap();
        let path = server.data().join("global/pg_control");
        assert!(control.to_bytes()[..] == fs::read(&path).unwrap()[..], "every byte is the same");
        let shown = run_ok("pg_controldata", &[server.data_str()]);
        let says = |name: &str| {
            let line = shown.lines().find(|line| line.starts_with(&format!("{name}:"))).expect(name);
            line.split_once(':').unwrap().1.trim().to_owned()
        };
        let body = control.checkpoint_copy;
        assert_eq!(says("Database system identifier"), control.system_identifier.to_string());
        assert_eq!(says("Database cluster state"), control.state.name());
        assert_eq!(says("Latest checkpoint location"), control.checkpoint.to_string());
        assert_eq!(says("Latest checkpoint's REDO location"), body.redo.to_string());
        assert_eq!(says("Latest checkpoint's NextXID"), format!("{}:{}", body.next_xid >> 32, body.next_xid as u32));
        assert_eq!(says("Latest checkpoint's NextOID"), body.next_oid.to_string());
        assert_eq!(says("Latest checkpoint's oldestXID's DB"), body.oldest_xid_db.to_string());
        assert_eq!(says("Latest checkpoint's oldestMulti's DB"), body.oldest_multi_db.to_string());
        assert_eq!(says("Bytes per WAL segment"), control.segment_size.bytes().to_string());
        assert_eq!(says("max_connections setting"), control.max_connections.to_string());
        assert_eq!(says("max_locks_per_xact setting"), control.max_locks_per_xact.to_string());
        assert_eq!(says("Data page checksum version"), control.data_checksum_version.to_string());
        // And PostgreSQL believes what we write.
        let mut opened = DataDir::open(&server.data()).unwrap();
        let mut changed = opened.control().clone();
        changed.time = 1_000_000_000;
        changed.state = DbState::ShutDownInRecovery;
        opened.write_control(changed).unwrap();
        let shown = run_ok("pg_controldata", &[server.data_str()]);
        assert!(
            shown.contains("shut down in recovery") && shown.contains("Sep  9") && !shown.contains("WARNING"),
            "{shown}"
        );
    }
}

#[test]
#[ignore = "needs PostgreSQL"]
fn only_one_of_us_at_a_time() {
    let server = Server::new(&[], "");
    let lock = DataDirLock::acquire(&server.data()).unwrap();
    let refused = run("postgres", &["-D", server.data_str()]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "stock PostgreSQL must not start");
    assert!(text.contains("lock file \"postmaster.pid\" already exists"), "{text}");
    assert!(text.contains(&format!("(PID {})", std::process::id())), "{text}");
    assert!(!server.start().status.success());
    assert!(server.data().join("postmaster.pid").exists(), "the lock survives the attempt");
    drop(lock);
    server.start_ok();
    let error = DataDir::open(&server.data()).unwrap_err().to_string();
    assert!(error.contains("is in use by process"), "{error}");

    let pidfile = fs::read_to_string(server.data().join("postmaster.pid")).unwrap();
    let postmaster = pidfile.lines().next().unwrap().to_owned();
    assert!(Command::new("kill").args(["-9", &postmaster]).status().unwrap().success());
    // Its children notice soon and end; until then the directory is still theirs.
    let began = std::time::Instant::now();
    loop {
        match DataDir::open(&server.data()) {
            Ok(_) => break,
            Err(error) => assert!(began.elapsed().as_secs() < 30, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(!server.data().join("postmaster.pid").exists());
    server.start_ok();
}

#[test]
#[ignore = "needs PostgreSQL"]
fn what_a_server_leaves_behind() {
    let server = Server::new(&[], "wal_level = logical\nmax_prepared_transactions = 5\ntrack_commit_timestamp = on");
    let space = server.dir.path().join("space with \\ in it");
    fs::create_dir(&space).unwrap();
    server.start_ok();
    let location = space.to_str().unwrap();
    server.sql(&format!("CREATE TABLESPACE elsewhere LOCATION '{location}'"));
    server.sql("CREATE DATABASE other TABLESPACE elsewhere");
    server.sql("SELECT pg_create_physical_replication_slot('physical', true)");
    for (origin, lsn) in [("one", "1/2"), ("two", "3/4")] {
        server.sql(&format!("SELECT pg_replication_origin_create('{origin}')"));
        server.sql(&format!("SELECT pg_replication_origin_advance('{origin}', '{lsn}')"));
    }
    server.sql("CREATE TABLE t (a int)");
    let xid = server.sql("BEGIN; INSERT INTO t VALUES (1); SELECT pg_current_xact_id(); PREPARE TRANSACTION 'p'");
    let full_xid: u64 = xid.trim().parse().unwrap();
    server.sql("VACUUM FULL pg_class");
    let oid = server.sql("SELECT oid FROM pg_database WHERE datname = 'other'");
    let spc = server.sql("SELECT oid FROM pg_tablespace WHERE spcname = 'elsewhere'");
    let spc: u32 = spc.trim().parse().unwrap();

    let mut label = server.sql("SELECT pg_backup_start('a label', true); SELECT labelfile FROM pg_backup_stop(false)");
    label = label.trim_start_matches(|c: char| c != 'S').to_owned();
    let label = BackupLabel::parse(&label).unwrap();
    assert!(label.streamed && !label.from_standby && label.label.as_deref() == Some("a label"));
    // Bracketed, because psql adds a newline, and drops the result of pg_backup_start into the same output.
    let map =
        server.sql("SELECT pg_backup_start('l', true); SELECT '<' || spcmapfile || E'\\n>' FROM pg_backup_stop(false)");
    let map = &map[map.find('<').unwrap() + 1..map.rfind('>').unwrap()];
    let map = parse_tablespace_map(map.as_bytes()).unwrap();
    assert_eq!((map[0].oid, &map[0].path), (spc, &space));

    server.sql("CHECKPOINT");
    server.stop("immediate");
    let data = DataDir::open(&server.data()).unwrap();
    assert_eq!(data.control().state, DbState::InProduction);
    assert_eq!(data.slots().iter().map(|slot| slot.name.as_str()).collect::<Vec<_>>(), ["physical"]);
    assert!(data.slots()[0].restart_lsn.is_valid());

    let files = TwoPhaseFiles::new(data.path());
    assert_eq!(files.list().unwrap(), [full_xid]);
    let path = server.data().join(format!("pg_twophase/{full_xid:016X}"));
    let stock = fs::read(&path).unwrap();
    files.write(full_xid, &files.read(full_xid).unwrap()).unwrap();
    assert!(fs::read(&path).unwrap() == stock);

    let states = origins::read(data.path()).unwrap();
    assert_eq!(states.iter().map(|(_, lsn)| lsn.to_string()).collect::<Vec<_>>(), ["1/2", "3/4"]);
    let path = server.data().join("pg_logical/replorigin_checkpoint");
    let stock = fs::read(&path).unwrap();
    origins::write(data.path(), states).unwrap();
    assert!(fs::read(&path).unwrap() == stock);

    let oid: u32 = oid.trim().parse().unwrap();
    for directory in [data.path().join("global"), data.directories().database(spc, oid)] {
        let path = directory.join("pg_filenode.map");
        let stock = fs::read(&path).unwrap();
        assert!(relmap::read(&directory).unwrap().iter().any(|(catalog, _)| [1259, 1262].contains(catalog)));
        relmap::write(&directory, &stock).unwrap();
        assert!(fs::read(&path).unwrap() == stock);
    }
    for kind in SlruKind::ALL {
        let mut slru = data.slru(kind, 4);
        let last = *slru.segments().unwrap().last().unwrap_or_else(|| panic!("{kind:?} has no segment"));
        slru.page_mut(last * 32).unwrap();
        slru.sync().unwrap();
    }
    let mut clog = data.slru(SlruKind::Xact, 1);
    assert_eq!(clog.page(0).unwrap()[full_xid as usize / 4] >> (full_xid % 4 * 2) & 3, 0, "still prepared");
    let before = (full_xid - 1) as usize;
    assert_eq!(clog.page(0).unwrap()[before / 4] >> (before % 4 * 2) & 3, 1, "committed");
    data.directories().remove_relation_caches().unwrap();
    data.sync().unwrap();
    drop(data);

    server.start_ok();
    assert_eq!(server.sql("SELECT gid FROM pg_prepared_xacts").trim(), "p");
    assert_eq!(server.sql("SELECT remote_lsn FROM pg_replication_origin_status ORDER BY 1"), "1/2\n3/4\n");
    // The slot would wait for it.
    server.sql("COMMIT PREPARED 'p'");
    server.sql("SELECT pg_create_logical_replication_slot('logical', 'test_decoding')");
    server.stop("fast");
    let error = DataDir::open(&server.data()).unwrap_err().to_string();
    assert!(error.contains("(logical)"), "{error}");
    let read = slots::read_slots(&server.data()).unwrap();
    assert_eq!(read.iter().map(slots::Slot::is_logical).collect::<Vec<_>>(), [true, false]);
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_directory_changed_by_us_is_served() {
    let server = Server::new(&[], "");
    let space = server.dir.path().join("space");
    fs::create_dir(&space).unwrap();
    server.start_ok();
    server.sql(&format!("CREATE TABLESPACE s LOCATION '{}'", space.display()));
    server.sql("CREATE DATABASE d TEMPLATE template0");
    server.sql("CREATE DATABASE e TEMPLATE template0");
    let oids: Vec<u32> = server
        .sql("SELECT oid FROM pg_database WHERE datname IN ('d', 'e') ORDER BY datname")
        .lines()
        .map(|oid| oid.parse().unwrap())
        .collect();
    let spc: u32 = server.sql("SELECT oid FROM pg_tablespace WHERE spcname = 's'").trim().parse().unwrap();
    server.stop("fast");
    {
        use walrider_datadir::directories::Missing;
        let data = DataDir::open(&server.data()).unwrap();
        let directories = data.directories();
        let (from, to) = ((1663, oids[0]), (1663, oids[1]));
        directories.copy_database(from, to, Missing::Refuse, &data.relation_files()).unwrap();
        assert!(directories.drop_tablespace(spc).unwrap());
        directories.create_tablespace(spc, space.to_str().unwrap().as_bytes()).unwrap();
        let mut clog = data.slru(SlruKind::Xact, 4);
        clog.page_mut(0).unwrap();
        clog.sync().unwrap();
    }
    server.start_ok();
    let host = server.dir.path().to_str().unwrap();
    run_ok("psql", &["-Xq", "-h", host, "-U", "postgres", "-d", "e", "-c", "CREATE TABLE t TABLESPACE s AS SELECT 1"]);
}

#[test]
#[ignore = "needs PostgreSQL"]
fn settings_are_read_as_the_server_reads_them() {
    let server = Server::new(&[], "include_dir = 'conf.d'\ninclude_if_exists 'none.conf'\nwork_mem=4MB # first");
    fs::create_dir(server.data().join("conf.d")).unwrap();
    let included = "Work_Mem   0x2000\ncluster_name = 'it''s \\'x\\' \\\\ \\101 # y'#c\r\nmy.setting = a-b:c.d/e\n\
                    random_page_cost = .5e+1\nmy.\u{e9}t\u{e9} = '\u{e9}'\ninclude '../more.conf'\nrestore_command = ''\n";
    fs::write(server.data().join("conf.d/10.conf"), included).unwrap();
    fs::write(server.data().join("more.conf"), "bgwriter_delay 30ms\nrecovery_target_name = 'x'").unwrap();
    set_auto_conf(&server.data(), &[("restore_command", "cp '/a\\b/%f' \"%p\""), ("work_mem", "8MB")]).unwrap();
    server.start_ok();
    server.sql("ALTER SYSTEM SET archive_cleanup_command = 'it''s \\ %r'");
    let theirs = server.sql(
        "SELECT DISTINCT ON (lower(name)) lower(name), setting, sourceline, sourcefile FROM pg_file_settings \
         ORDER BY lower(name), seqno DESC",
    );
    let config = Config::read(&server.data(), None).unwrap();
    let mut ours: Vec<String> = config
        .effective()
        .map(|s| format!("{}|{}|{}|{}", s.name, s.value, s.line, fs::canonicalize(&s.file).unwrap().display()))
        .collect();
    ours.sort();
    let mut theirs: Vec<String> = theirs
        .lines()
        .map(|line| {
            let (rest, file) = line.rsplit_once('|').unwrap();
            format!("{rest}|{}", fs::canonicalize(file).unwrap().display())
        })
        .collect();
    theirs.sort();
    assert_eq!(ours, theirs);
    assert!(ours.len() > 10);
    server.stop("fast");
    write_recovery_signal(&server.data()).unwrap();
    assert!(SignalFiles::read(&server.data()).unwrap().recovery);
}

#[test]
#[ignore = "needs PostgreSQL"]
fn times_are_read_as_the_server_reads_them() {
    let server = Server::new(&[], "");
    server.start_ok();
    let abbreviations = major().format().session_zone_abbreviations;
    for zone in ["UTC", "Europe/Rome", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"] {
        let printed = server.sql(&format!(
            "SET timezone = '{zone}'; SELECT to_char(t, 'YYYY-MM-DD HH24:MI:SS.US'), t, to_char(t, 'YYYY-MM-DD HH24:MI:SS.US TZ') \
             FROM generate_series('2025-01-01'::timestamptz, '2027-01-01', '2399 min 7.123456 s') t"
        ));
        let texts: Vec<&str> = printed.lines().flat_map(|line| line.split('|')).collect();
        let list = texts.iter().map(|text| format!("'{text}'")).collect::<Vec<_>>().join(",");
        let theirs = server.sql(&format!(
            "SET timezone = '{zone}'; SELECT (extract(epoch from t::timestamptz) * 1000000)::bigint - 946684800000000 \
             FROM unnest(ARRAY[{list}]) WITH ORDINALITY AS u (t, n) ORDER BY n"
        ));
        assert_eq!(texts.len(), theirs.lines().count());
        for (text, expected) in texts.iter().zip(theirs.lines()) {
            let ours = parse_timestamptz(text, zone, abbreviations).map(|time| time.0.to_string());
            let uncertain = !abbreviations && zone != "UTC" && text.ends_with(|c: char| c.is_ascii_alphabetic());
            match ours {
                Err(error) if uncertain => assert!(error.contains("is not certain"), "{error}"),
                ours => assert_eq!(ours.as_deref(), Ok(expected), "{text} in {zone}"),
            }
        }
    }
}

#[test]
#[ignore = "needs PostgreSQL"]
fn a_flipped_bit_in_pg_control_is_found() {
    let server = Server::new(&[], "");
    let path = server.data().join("global/pg_control");
    let good = fs::read(&path).unwrap();
    // In 17 the struct ends in padding.
    let len = if major() == Major::V17 { 292 } else { 296 };
    for at in (0..len).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 4;
        assert!(ControlFile::parse(&bad).is_err(), "byte {at}");
    }
}
