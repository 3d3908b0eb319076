//! Options of BASE_BACKUP (`parse_basebackup_options`, `backup/basebackup.c`, PostgreSQL 18).

use walrider_backup::checksum::Checksums;
use walrider_backup::manifest::ManifestWishes;
use walrider_wire::replication::Options;
use walrider_wire::server::boolean;

use crate::refusal::Refusal;

/// The longest label, in bytes (`MAXPGPATH`).
const MAX_LABEL: usize = 1024;
/// What MAX_RATE can be, in kB a second (`MAX_RATE_LOWER`, `MAX_RATE_UPPER`).
const RATES: std::ops::RangeInclusive<i64> = 32..=1 << 20;

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// LABEL.
    pub label: String,
    /// PROGRESS: tell sizes before.
    pub sizes: bool,
    /// WAL: put it into the backup.
    pub wal: bool,
    /// WAIT: the client relies on archived WAL.
    pub wait: bool,
    /// MAX_RATE, in bytes a second.
    pub rate: Option<u64>,
    /// TABLESPACE_MAP: send that instead of links.
    pub tablespace_map: bool,
    /// VERIFY_CHECKSUMS.
    pub verify: bool,
    /// MANIFEST and MANIFEST_CHECKSUMS.
    pub manifest: Option<ManifestWishes>,
}

impl Wishes {
    /// Reads them.
    ///
    /// # Errors
    /// One is not known, is there twice, has a wrong value, or is not supported.
    pub fn parse(options: &Options) -> Result<Wishes, Refusal> {
        let mut wishes = Wishes {
            label: "base backup".to_owned(),
            sizes: false,
            wal: false,
            wait: true,
            rate: None,
            tablespace_map: false,
            verify: true,
            manifest: None,
        };
        let (mut checksums, mut target, mut compression) = (None, None, None);
        let mut seen: Vec<&str> = Vec::new();
        for (name, value) in options {
            if seen.contains(&name.as_str()) {
                return Err(syntax(format!("duplicate option \"{name}\"")));
            }
            seen.push(name);
            let text = || value.as_deref().ok_or_else(|| syntax(format!("{name} requires a parameter")));
            let is = || match value.as_deref() {
                None => Ok(true),
                Some(value) => boolean(value).ok_or_else(|| syntax(format!("{name} requires a Boolean value"))),
            };
            match name.as_str() {
                "label" => wishes.label = label(text()?)?,
                "progress" => wishes.sizes = is()?,
                // It begins with the last restartpoint, either way.
                "checkpoint" => match text()?.to_ascii_lowercase().as_str() {
                    "fast" | "spread" => {}
                    _ => return Err(syntax(format!("unrecognized checkpoint type: \"{}\"", text()?))),
                },
                "wait" => wishes.wait = is()?,
                "wal" => wishes.wal = is()?,
                "incremental" if is()? => return Err(incremental()),
                "incremental" => {}
                "max_rate" => wishes.rate = Some(rate(text()?)?),
                "tablespace_map" => wishes.tablespace_map = is()?,
                "verify_checksums" => wishes.verify = is()?,
                "manifest" => {
                    let value = text()?;
                    let force_encode = value.eq_ignore_ascii_case("force-encode");
                    let wanted = force_encode
                        || boolean(value)
                            .ok_or_else(|| syntax(format!("unrecognized manifest option: \"{value}\"")))?;
                    wishes.manifest = wanted.then_some(ManifestWishes { checksums: Checksums::Crc32c, force_encode });
                }
                "manifest_checksums" => {
                    let unknown =
                        || syntax(format!("unrecognized checksum algorithm: \"{}\"", text().unwrap_or_default()));
                    checksums = Some(Checksums::parse(text()?).ok_or_else(unknown)?);
                }
                "target" => target = Some(text()?),
                "compression" => compression = Some(text()?),
                "target_detail" | "compression_detail" => {}
                _ => return Err(syntax(format!("unrecognized base backup option: \"{name}\""))),
            }
        }
        match (&mut wishes.manifest, checksums) {
            (None, Some(_)) => return Err(syntax("manifest checksums require a backup manifest")),
            (Some(manifest), Some(checksums)) => manifest.checksums = checksums,
            (_, None) => {}
        }
        check_target(target, seen.contains(&"target_detail"))?;
        check_compression(compression, seen.contains(&"compression_detail"))?;
        Ok(wishes)
    }
}

fn syntax(message: impl Into<String>) -> Refusal {
    Refusal::new("42601", message)
}

fn unsupported(message: String) -> Refusal {
    Refusal::new("0A000", message)
}

/// What is not told of incremental backups: there are no WAL summaries here.
pub(crate) fn incremental() -> Refusal {
    unsupported("incremental backups are not supported by this standby".to_owned())
        .hint("Take a full backup here, or an incremental one from the primary.")
}

fn label(text: &str) -> Result<String, Refusal> {
    let invalid = |message: String| Err(Refusal::new("22023", message));
    if text.len() > MAX_LABEL {
        return invalid(format!("backup label too long (max {MAX_LABEL} bytes)"));
    }
    // It would be a line of backup_label of its own.
    if text.contains(['\n', '\r']) {
        return invalid("backup label must be one line".to_owned());
    }
    Ok(text.to_owned())
}

fn rate(text: &str) -> Result<u64, Refusal> {
    let rate: i64 = text.parse().map_err(|_| syntax("max_rate requires a numeric value"))?;
    if !RATES.contains(&rate) {
        let (least, most) = RATES.into_inner();
        let message = format!("{rate} is outside the valid range for parameter \"MAX_RATE\" ({least} .. {most})");
        return Err(Refusal::new("22003", message));
    }
    Ok(rate as u64 * 1024)
}

fn check_target(target: Option<&str>, has_detail: bool) -> Result<(), Refusal> {
    match target {
        None if has_detail => Err(syntax("target detail cannot be used without target")),
        None => Ok(()),
        Some("client") if has_detail => Err(syntax("target \"client\" does not accept a target detail")),
        Some("client") => Ok(()),
        Some(target @ ("server" | "blackhole")) => {
            Err(unsupported(format!("target \"{target}\" is not supported by this standby")))
        }
        Some(target) => Err(Refusal::new("22023", format!("unrecognized target: \"{target}\""))),
    }
}

fn check_compression(algorithm: Option<&str>, has_detail: bool) -> Result<(), Refusal> {
    let message = "compression detail cannot be specified unless compression is enabled";
    match algorithm {
        None if has_detail => Err(syntax(message)),
        None | Some("none") => Ok(()),
        Some(algorithm @ ("gzip" | "lz4" | "zstd")) => {
            let refusal = unsupported(format!("{algorithm} compression is not supported by this standby"));
            Err(refusal.hint(format!("Let the client compress: --compress=client-{algorithm}.")))
        }
        Some(algorithm) => Err(syntax(format!("unrecognized compression algorithm: \"{algorithm}\""))),
    }
}

#[cfg(test)]
mod tests {
    use walrider_wire::replication::ReplicationCommand;

    use super::*;

    fn wishes(options: &str) -> Result<Wishes, Refusal> {
        match ReplicationCommand::parse(&format!("BASE_BACKUP {options}")) {
            Ok(ReplicationCommand::BaseBackup { options }) => Wishes::parse(&options),
            other => panic!("{options}: {other:?}"),
        }
    }

    #[test]
    fn what_pg_basebackup_sends() {
        let stream = "( LABEL 'pg_basebackup base backup',  PROGRESS,  CHECKPOINT 'fast',  WAIT 0,  MANIFEST 'yes',  TARGET 'client')";
        let manifest = Some(ManifestWishes { checksums: Checksums::Crc32c, force_encode: false });
        let expected = Wishes {
            label: "pg_basebackup base backup".to_owned(),
            sizes: true,
            wal: false,
            wait: false,
            rate: None,
            tablespace_map: false,
            verify: true,
            manifest,
        };
        assert_eq!(wishes(stream), Ok(expected.clone()));
        let fetch = "(LABEL 'x', WAL, WAIT 0, MAX_RATE 32, TABLESPACE_MAP, VERIFY_CHECKSUMS 0, MANIFEST 'force-encode', \
                     MANIFEST_CHECKSUMS 'SHA256', COMPRESSION 'none')";
        let manifest = Some(ManifestWishes { checksums: Checksums::Sha256, force_encode: true });
        let expected = Wishes {
            label: "x".to_owned(),
            sizes: false,
            wal: true,
            rate: Some(32 << 10),
            tablespace_map: true,
            verify: false,
            manifest,
            ..expected
        };
        assert_eq!(wishes(fetch), Ok(expected));
        assert_eq!(wishes("").map(|wishes| (wishes.wait, wishes.manifest)), Ok((true, None)));
    }

    #[test]
    fn what_is_refused() {
        for (options, code, message) in [
            ("(LABEL 'a', LABEL 'b')", "42601", "duplicate option \"label\""),
            ("(LABEL)", "42601", "label requires a parameter"),
            ("(NONSENSE 1)", "42601", "unrecognized base backup option: \"nonsense\""),
            ("(CHECKPOINT 'slow')", "42601", "unrecognized checkpoint type: \"slow\""),
            ("(MAX_RATE 31)", "22003", "31 is outside the valid range for parameter \"MAX_RATE\" (32 .. 1048576)"),
            ("(MANIFEST 'perhaps')", "42601", "unrecognized manifest option: \"perhaps\""),
            ("(MANIFEST_CHECKSUMS 'crc32c')", "42601", "manifest checksums require a backup manifest"),
            ("(MANIFEST 'yes', MANIFEST_CHECKSUMS 'md5')", "42601", "unrecognized checksum algorithm: \"md5\""),
            ("(INCREMENTAL)", "0A000", "incremental backups are not supported by this standby"),
            ("(TARGET 'server', TARGET_DETAIL '/tmp')", "0A000", "target \"server\" is not supported by this standby"),
            ("(TARGET 'moon')", "22023", "unrecognized target: \"moon\""),
            ("(TARGET_DETAIL 'x')", "42601", "target detail cannot be used without target"),
            ("(COMPRESSION 'gzip')", "0A000", "gzip compression is not supported by this standby"),
            ("(COMPRESSION 'rar')", "42601", "unrecognized compression algorithm: \"rar\""),
            ("(PROGRESS 'perhaps')", "42601", "progress requires a Boolean value"),
        ] {
            let refusal = wishes(options).unwrap_err();
            assert_eq!((refusal.0.code.as_str(), refusal.0.message.as_str()), (code, message), "{options}");
        }
        assert_eq!(label("a\nBACKUP FROM: primary").unwrap_err().0.code, "22023");
        assert!(label(&"x".repeat(1025)).is_err() && label(&"x".repeat(1024)).is_ok());
    }
}
