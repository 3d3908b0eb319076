//! Arbitrary bytes through every parser of the server's side. Shared with the target under `fuzz/`.

use walrider_wire::backend::{Frame, ServerMessage};
use walrider_wire::command::quote_identifier;
use walrider_wire::frontend;
use walrider_wire::replication::{CommandError, Options, ReplicationCommand};
use walrider_wire::server::{self, FromClient, Opening, Startup};
use walrider_wire::stream::FromStandby;

/// Beginnings that are hard to guess.
const COMMANDS: [&str; 12] = [
    "",
    "READ_REPLICATION_SLOT ",
    "CREATE_REPLICATION_SLOT ",
    "CREATE_REPLICATION_SLOT s PHYSICAL ",
    "CREATE_REPLICATION_SLOT s LOGICAL ",
    "DROP_REPLICATION_SLOT ",
    "ALTER_REPLICATION_SLOT s",
    "START_REPLICATION ",
    "START_REPLICATION SLOT s LOGICAL 0/0",
    "TIMELINE_HISTORY ",
    "SHOW ",
    "BASE_BACKUP ",
];

/// As a connection: a first packet, then messages; and as all that a message or command has.
pub fn everything(bytes: &[u8]) {
    opening(bytes);
    proof(bytes);
    let text = String::from_utf8_lossy(bytes);
    COMMANDS.iter().for_each(|begin| command(&format!("{begin}{text}")));
    opening(&[&frontend::PROTOCOL_3_2.to_be_bytes(), bytes].concat());
    let mut rest = bytes;
    if let Ok(Some(len)) = Opening::peek(bytes) {
        assert!((Opening::HEADER..=Opening::HEADER + Opening::MAX_LEN).contains(&len));
        if let Some(packet) = bytes.get(Opening::HEADER..len) {
            opening(packet);
            rest = &bytes[len..];
        }
    }
    while let Ok(Some(frame)) = Frame::peek(rest, 1 << 20) {
        let Some(body) = rest.get(Frame::HEADER..frame.total_len) else { break };
        message(frame.tag, body);
        rest = &rest[frame.total_len..];
    }
}

/// A startup is read again as it was written.
fn opening(packet: &[u8]) {
    match Opening::parse(packet) {
        Ok(Opening::Startup(startup)) => {
            let Startup { protocol, parameters } = &startup;
            let pairs: Vec<(&str, &str)> = parameters.iter().map(|(name, value)| (&**name, &**value)).collect();
            let mut written = Vec::new();
            frontend::startup(&mut written, *protocol, &pairs);
            assert_eq!(&written[Opening::HEADER..], packet);
            let _ = (startup.get("user"), startup.replication());
            if let Some((spoken, options)) = startup.negotiation() {
                assert!(spoken <= *protocol);
                written.clear();
                server::negotiate_protocol_version(&mut written, spoken, &options);
            }
        }
        Ok(Opening::Cancel { key, .. }) => assert_eq!(key.len() + 8, packet.len()),
        Ok(Opening::Ssl | Opening::Gss) => assert_eq!(packet.len(), 4),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn message(tag: u8, body: &[u8]) {
    match FromClient::parse(tag, body) {
        Ok(FromClient::Query(text)) => command(text),
        Ok(FromClient::Password(body)) => proof(body),
        Ok(FromClient::CopyData(payload)) => {
            let _ = FromStandby::parse(payload);
            let mut whole = Vec::new();
            server::copy_data(&mut whole, payload);
            assert_eq!(whole[..5], server::copy_data_header(payload.len()));
        }
        _ => (),
    }
}

fn proof(body: &[u8]) {
    if let Ok(password) = server::password(body) {
        assert_eq!(password.len() + 1, body.len());
    }
    if let Ok((mechanism, data)) = server::sasl_initial_response(body) {
        assert_eq!(mechanism.len() + 5 + data.map_or(0, <[u8]>::len), body.len());
    }
}

/// What is read has no more than the text, is what is read of it written in another way, and an error can be sent.
fn command(text: &str) {
    match ReplicationCommand::parse(text) {
        Ok(ReplicationCommand::Sql) => (),
        Ok(command) => {
            let options = match &command {
                ReplicationCommand::CreatePhysicalSlot { options, .. }
                | ReplicationCommand::CreateLogicalSlot { options, .. }
                | ReplicationCommand::AlterReplicationSlot { options, .. }
                | ReplicationCommand::StartLogical { options, .. }
                | ReplicationCommand::BaseBackup { options } => options.as_slice(),
                _ => &[],
            };
            assert!(options.len() <= text.len());
            let texts = options.iter().map(|(name, value)| name.len() + value.as_ref().map_or(0, String::len));
            assert!(texts.sum::<usize>() <= 2 * text.len());
            if let Some(again) = written(&command) {
                assert_eq!(ReplicationCommand::parse(&again).as_ref(), Ok(&command), "{text}: {again}");
            }
            // A semicolon at most.
            let parsed = ReplicationCommand::parse(&format!("{text};"));
            assert!(parsed.as_ref() == Ok(&command) || matches!(parsed, Err(CommandError::Syntax { .. })));
        }
        Err(error) => {
            let message = error.to_string();
            let at = message.rsplit_once("character ").and_then(|(_, at)| at.split(':').next()?.parse().ok());
            assert!(at.is_none_or(|at: usize| (1..=text.chars().count()).contains(&at)), "{message}");
            let (severity, code) = ("ERROR".to_owned(), CommandError::SQLSTATE.to_owned());
            let error = ServerMessage { severity, code, message, ..ServerMessage::default() };
            let mut out = Vec::new();
            server::error_response(&mut out, &error);
            assert_eq!(ServerMessage::parse(&out[Frame::HEADER..]), Ok(error));
        }
    }
}

/// The command in its plainest form; nothing for those whose name may have been joined from several.
fn written(command: &ReplicationCommand) -> Option<String> {
    let name = |name: &str| quote_identifier(name);
    let list = |options: &Options| {
        let value = |value: &Option<String>| value.as_ref().map(|value| format!(" '{}'", value.replace('\'', "''")));
        let option = |(key, given): &(String, Option<String>)| name(key) + &value(given).unwrap_or_default();
        let options: Vec<String> = options.iter().map(option).collect();
        if options.is_empty() { String::new() } else { format!("({})", options.join(",")) }
    };
    let temporary = |is: &bool| if *is { " TEMPORARY" } else { "" };
    Some(match command {
        ReplicationCommand::CreatePhysicalSlot { slot, temporary: is, options } => {
            format!("CREATE_REPLICATION_SLOT {}{} PHYSICAL{}", name(slot), temporary(is), list(options))
        }
        ReplicationCommand::CreateLogicalSlot { slot, plugin, temporary: is, options } => {
            let (slot, plugin) = (name(slot), name(plugin));
            format!("CREATE_REPLICATION_SLOT {slot}{} LOGICAL {plugin}{}", temporary(is), list(options))
        }
        ReplicationCommand::DropReplicationSlot { slot, wait } => {
            format!("DROP_REPLICATION_SLOT {}{}", name(slot), if *wait { " WAIT" } else { "" })
        }
        ReplicationCommand::AlterReplicationSlot { slot, options } => {
            format!("ALTER_REPLICATION_SLOT {}{}", name(slot), list(options))
        }
        ReplicationCommand::StartPhysical { slot, start, timeline } => {
            let slot = slot.as_ref().map(|slot| format!("SLOT {} ", name(slot))).unwrap_or_default();
            let timeline = timeline.map(|timeline| format!(" TIMELINE {timeline}")).unwrap_or_default();
            format!("START_REPLICATION {slot}{start}{timeline}")
        }
        ReplicationCommand::StartLogical { slot, start, options } => {
            format!("START_REPLICATION SLOT {} LOGICAL {start}{}", name(slot), list(options))
        }
        ReplicationCommand::TimelineHistory(timeline) => format!("TIMELINE_HISTORY {timeline}"),
        ReplicationCommand::BaseBackup { options } => format!("BASE_BACKUP{}", list(options)),
        ReplicationCommand::IdentifySystem => "IDENTIFY_SYSTEM".to_owned(),
        ReplicationCommand::UploadManifest => "UPLOAD_MANIFEST".to_owned(),
        _ => return None,
    })
}
