//! Ordinary sessions, and statements on their way at once.

use walrider_session::{ConnectOptions, Connection, Transaction};

use super::server::Server;

fn connect(server: &Server) -> Connection {
    let options = ConnectOptions::resolve_ordinary(&server.unix("dbname=postgres"), "pipeline").unwrap();
    Connection::open(&options).unwrap()
}

fn one_value(connection: &mut Connection, query: &str) -> String {
    let rows = connection.simple_query(query).unwrap();
    String::from_utf8(rows[0][0].clone().unwrap()).unwrap()
}

#[test]
#[ignore = "needs PostgreSQL"]
fn statements_are_executed_without_waiting_for_answers() {
    let server = Server::start("", "");
    let mut connection = connect(&server);
    assert_eq!(
        one_value(&mut connection, "SELECT backend_type FROM pg_stat_activity WHERE pid = pg_backend_pid()"),
        "client backend"
    );
    connection.simple_query("CREATE TABLE t (id int PRIMARY KEY, v text)").unwrap();

    let mut pipeline = connection.pipeline().unwrap();
    pipeline.prepare(0, "begin", "BEGIN").unwrap();
    pipeline.prepare(0, "insert", "INSERT INTO t VALUES ($1, $2)").unwrap();
    pipeline.prepare(0, "update", "UPDATE t SET v = $2 WHERE id = $1").unwrap();
    pipeline.prepare(0, "copy", "COPY t FROM STDIN").unwrap();
    pipeline.prepare(0, "commit", "COMMIT").unwrap();
    pipeline.execute(1, "begin", [], None).unwrap();
    for id in 0..3 {
        let id = id.to_string();
        pipeline.execute(2, "insert", [Some(id.as_bytes()), None], Some(1)).unwrap();
    }
    pipeline.execute(3, "copy", [], Some(2)).unwrap();
    pipeline.copy_data(b"10\tten\n11\t").unwrap();
    pipeline.copy_data(b"eleven\n").unwrap();
    pipeline.copy_done().unwrap();
    pipeline.execute(4, "update", [Some(b"10".as_slice()), Some(b"x")], Some(1)).unwrap();
    pipeline.execute(5, "update", [Some(b"99".as_slice()), Some(b"x")], Some(1)).unwrap();
    pipeline.execute(6, "commit", [], None).unwrap();
    let outcome = pipeline.finish().unwrap();
    assert_eq!((outcome.failure, outcome.unexpected, outcome.prepared), (None, vec![(5, 0)], 5));
    assert_eq!((outcome.unexpected_total, outcome.transaction), (1, Transaction::None));
    assert_eq!(
        one_value(&mut connection, "SELECT string_agg(id || coalesce(v, '-'), ',' ORDER BY id) FROM t"),
        "0-,1-,2-,10x,11eleven"
    );

    // An error skips to the end, COPY and its data included; what was prepared before it stays so.
    let mut pipeline = connection.pipeline().unwrap();
    pipeline.prepare(0, "rollback", "ROLLBACK").unwrap();
    pipeline.execute(1, "begin", [], None).unwrap();
    pipeline.execute(2, "insert", [Some(b"0".as_slice()), None], Some(1)).unwrap();
    pipeline.prepare(3, "later", "SELECT 1").unwrap();
    pipeline.execute(4, "copy", [], None).unwrap();
    pipeline.copy_data(b"20\ttwenty\n").unwrap();
    pipeline.copy_done().unwrap();
    let outcome = pipeline.finish().unwrap();
    let (number, error) = outcome.failure.unwrap();
    assert_eq!(
        (number, error.code.as_str(), outcome.prepared, outcome.transaction),
        (2, "23505", 1, Transaction::Failed)
    );
    let mut pipeline = connection.pipeline().unwrap();
    pipeline.execute(1, "rollback", [], None).unwrap();
    // Damaged in the middle of its data.
    pipeline.execute(2, "copy", [], None).unwrap();
    pipeline.copy_data(b"20\ttwenty\nx\ty\n").unwrap();
    pipeline.copy_done().unwrap();
    let outcome = pipeline.finish().unwrap();
    let (number, error) = outcome.failure.unwrap();
    assert_eq!((number, error.code.as_str(), outcome.transaction), (2, "22P02", Transaction::None));
    assert_eq!(one_value(&mut connection, "SELECT count(*) FROM t"), "5");
}

#[test]
#[ignore = "needs PostgreSQL"]
fn nobody_waits_for_ever_when_both_sides_have_much_to_say() {
    let server = Server::start("", "");
    let mut connection = connect(&server);
    let large = vec![b'x'; 300_000];
    let mut pipeline = connection.pipeline().unwrap();
    pipeline.prepare(0, "echo", "SELECT $1::text").unwrap();
    for number in 0..100 {
        pipeline.execute(number, "echo", [Some(large.as_slice())], Some(1)).unwrap();
    }
    let outcome = pipeline.finish().unwrap();
    assert_eq!((outcome.failure, outcome.unexpected_total), (None, 0));
    assert_eq!(one_value(&mut connection, "SELECT 'still of use'"), "still of use");
}
