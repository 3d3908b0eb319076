//! Arbitrary bytes through every parser. Shared with the target under `fuzz/`.

use walrider_wire::backend::{self, Authentication, Frame, ServerMessage};
use walrider_wire::conninfo::{ConnInfo, pgpass};
use walrider_wire::stream::{FromStandby, Streamed};

/// As all there is: what is read is written again as it was, and nothing is longer than its bytes.
pub fn everything(bytes: &[u8]) {
    stream(bytes);
    body(bytes);
    text(&String::from_utf8_lossy(bytes));
    let mut rest = bytes;
    while let Ok(Some(frame)) = Frame::peek(rest, 1 << 20) {
        assert!((Frame::HEADER..=1 << 20).contains(&frame.total_len));
        let Some(message) = rest.get(Frame::HEADER..frame.total_len) else { break };
        stream(message);
        body(message);
        rest = &rest[frame.total_len..];
    }
}

fn stream(bytes: &[u8]) {
    if let Ok(message) = Streamed::parse(bytes) {
        let mut written = Vec::new();
        message.encode(&mut written);
        assert_eq!(Streamed::parse(&written), Ok(message));
        assert_eq!(written.len(), bytes.len());
    }
    if let Ok(message) = FromStandby::parse(bytes) {
        let mut written = Vec::new();
        match message {
            FromStandby::Status(status) => status.encode(&mut written),
            FromStandby::Feedback(feedback) => feedback.encode(&mut written),
        }
        assert_eq!(FromStandby::parse(&written), Ok(message));
        assert_eq!(written.len(), bytes.len());
    }
}

fn body(bytes: &[u8]) {
    if let Ok(message) = ServerMessage::parse(bytes) {
        assert!(!message.to_string().contains(char::is_control));
        // A byte that is no UTF-8 becomes a character of three.
        assert!(message.message.len() <= 3 * ServerMessage::MAX_FIELD);
    }
    if let Ok(Authentication::Sasl(mechanisms)) = Authentication::parse(bytes) {
        assert!(mechanisms.iter().map(|name| name.len() + 1).sum::<usize>() < bytes.len());
    }
    if let Ok(values) = backend::data_row(bytes) {
        assert!(values.iter().map(|value| 4 + value.as_ref().map_or(0, Vec::len)).sum::<usize>() <= bytes.len());
    }
    if let Ok(names) = backend::row_description(bytes) {
        assert!(names.len() * 19 <= bytes.len());
    }
    let _ = backend::parameter_status(bytes);
    let _ = backend::negotiate_protocol_version(bytes);
    let _ = backend::command_complete(bytes);
}

fn text(text: &str) {
    for prefix in ["", "postgresql://", "postgres://u:p@", "password=x "] {
        let Ok(mut info) = ConnInfo::parse(&format!("{prefix}{text}")) else { continue };
        for secret in ["password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"] {
            if info.get(secret).is_some() {
                info.set(secret, "********").expect("a known keyword");
            }
        }
        let shown = info.to_string();
        assert_eq!(ConnInfo::parse(&shown).as_ref(), Ok(&info), "{shown}");
    }
    let _ = ConnInfo::service(text, "s", "file");
    let _ = pgpass::lookup(text, "h", "5432", "replication", "u");
}
