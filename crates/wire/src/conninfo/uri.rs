//! `postgresql://[user[:password]@][host][:port][,...][/dbname][?keyword=value[&...]]` (`conninfo_uri_parse_options`).

use super::{ConnInfo, ConnInfoError, error, is_known, is_secret};

/// Reads what follows the scheme.
pub(super) fn parse(rest: &str) -> Result<ConnInfo, ConnInfoError> {
    let mut info = ConnInfo::default();
    let mut rest = rest;
    if let Some(at) = rest.find(['@', '/']).filter(|&at| rest.as_bytes()[at] == b'@') {
        let (user, password) = rest[..at].split_once(':').unwrap_or((&rest[..at], ""));
        store(&mut info, "user", user)?;
        store(&mut info, "password", password)?;
        rest = &rest[at + 1..];
    }
    let (mut hosts, mut ports) = (String::new(), String::new());
    loop {
        let (host, after) = take_host(rest)?;
        hosts += host;
        rest = after;
        if let Some(after) = rest.strip_prefix(':') {
            let (port, after) = after.split_at(after.find(['/', '?', ',']).unwrap_or(after.len()));
            ports += port;
            rest = after;
        }
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None => break,
        }
        hosts.push(',');
        ports.push(',');
    }
    store(&mut info, "host", &hosts)?;
    store(&mut info, "port", &ports)?;
    if let Some(after) = rest.strip_prefix('/') {
        let (dbname, after) = after.split_at(after.find('?').unwrap_or(after.len()));
        store(&mut info, "dbname", dbname)?;
        rest = after;
    }
    if let Some(parameters) = rest.strip_prefix('?').filter(|parameters| !parameters.is_empty()) {
        // One "&" at the end is nothing.
        for parameter in parameters.strip_suffix('&').unwrap_or(parameters).split('&') {
            store_parameter(&mut info, parameter)?;
        }
    }
    Ok(info)
}

/// A host, or an IPv6 address in brackets, and what follows it.
fn take_host(text: &str) -> Result<(&str, &str), ConnInfoError> {
    let Some(address) = text.strip_prefix('[') else {
        return Ok(text.split_at(text.find([':', '/', '?', ',']).unwrap_or(text.len())));
    };
    match address.split_once(']') {
        None => error("end of string reached when looking for matching \"]\" in IPv6 host address in URI"),
        Some(("", _)) => error("IPv6 host address may not be empty in URI"),
        Some((_, rest)) if !rest.is_empty() && !rest.starts_with([':', '/', '?', ',']) => {
            let c = rest.chars().next().unwrap_or_default();
            error(format!("unexpected character \"{c}\" in URI (expected \":\" or \"/\")"))
        }
        Some(found) => Ok(found),
    }
}

fn store(info: &mut ConnInfo, keyword: &str, encoded: &str) -> Result<(), ConnInfoError> {
    if encoded.is_empty() { Ok(()) } else { info.set(keyword, &decode(encoded, is_secret(keyword))?) }
}

fn store_parameter(info: &mut ConnInfo, parameter: &str) -> Result<(), ConnInfoError> {
    let Some((keyword, value)) = parameter.split_once('=') else {
        return error(format!("missing key/value separator \"=\" in URI query parameter: \"{parameter}\""));
    };
    if value.contains('=') {
        return error(format!("extra key/value separator \"=\" in URI query parameter: \"{keyword}\""));
    }
    let keyword = decode(keyword, false)?;
    let value = decode(value, is_secret(&keyword))?;
    match (keyword.as_str(), value.as_str()) {
        // As JDBC writes it.
        ("ssl", "true") => info.set("sslmode", "require"),
        (known, value) if is_known(known) => info.set(known, value),
        (unknown, _) => error(format!("invalid URI query parameter: \"{}\"", unknown.escape_debug())),
    }
}

/// Decodes `%xx`. Spaces at either end are dropped, others refused (`conninfo_uri_decode`).
fn decode(text: &str, secret: bool) -> Result<String, ConnInfoError> {
    let shown = if secret { "********" } else { text };
    let trimmed = text.trim_matches(' ');
    if trimmed.contains(' ') {
        return error(format!("unexpected spaces found in \"{shown}\", use percent-encoded spaces (%20) instead"));
    }
    let mut decoded = Vec::with_capacity(trimmed.len());
    let mut bytes = trimmed.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let Some((high, low)) = digit().zip(digit()) else {
            return error(format!("invalid percent-encoded token: \"{shown}\""));
        };
        if (high, low) == (0, 0) {
            return error(format!("forbidden value %00 in percent-encoded value: \"{shown}\""));
        }
        decoded.push((high << 4 | low) as u8);
    }
    String::from_utf8(decoded).or_else(|_| error(format!("\"{shown}\" is not valid UTF-8 when decoded")))
}
