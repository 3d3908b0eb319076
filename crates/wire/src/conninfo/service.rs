//! Service files: sections of `keyword=value` lines (`parseServiceFile`).

use super::{ConnInfo, ConnInfoError, error, is_space};

/// See [`ConnInfo::service`].
pub(super) fn parse(text: &str, name: &str, file: &str) -> Result<Option<ConnInfo>, ConnInfoError> {
    let mut found: Option<ConnInfo> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_matches(is_space);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(section) = line.strip_prefix('[') {
            if found.is_some() {
                break;
            }
            if section.strip_prefix(name).is_some_and(|rest| rest.starts_with(']')) {
                found = Some(ConnInfo::default());
            }
            continue;
        }
        let Some(info) = &mut found else { continue };
        match line.split_once('=') {
            Some(("service", _)) => {
                return error(format!(
                    "nested service specifications not supported in service file \"{file}\", line {number}"
                ));
            }
            // The first one counts.
            Some((keyword, _)) if info.get(keyword).is_some() => (),
            Some((keyword, value)) if info.set(keyword, value).is_ok() => (),
            _ => return error(format!("syntax error in service file \"{file}\", line {number}")),
        }
    }
    Ok(found)
}
