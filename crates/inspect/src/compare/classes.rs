//! The table of classes: everything that `walrider compare` can find, whether it makes two directories different, and
//! why. The help text of the output and the tables of `docs/compare.md` follow this one.

/// When a finding of a class makes the directories different.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Always.
    Always,
    /// Only with `--strict`: PostgreSQL itself does not keep it equal, but it is content that recovery writes.
    Strict,
    /// Never: not the product of recovery, or made again when the server starts.
    Never,
}

/// One row of the table.
pub struct ClassInfo {
    /// The name in the output.
    pub name: &'static str,
    /// When it makes the directories different.
    pub counts: Counts,
    /// What is counted.
    pub unit: &'static str,
    /// Why it is what it is, for the reader of the summary.
    pub why: &'static str,
}

macro_rules! classes {
    ($($variant:ident $name:literal $counts:ident $unit:literal $why:literal;)*) => {
        /// A class of findings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Class {
            $(#[doc = $why] $variant,)*
        }

        impl Class {
            /// All of them, in the order of the table.
            pub const ALL: &[Class] = &[$(Class::$variant,)*];

            /// The row of this class.
            pub fn info(self) -> &'static ClassInfo {
                match self {
                    $(Class::$variant => {
                        &ClassInfo { name: $name, counts: Counts::$counts, unit: $unit, why: $why }
                    })*
                }
            }
        }
    };
}

classes! {
    Page "page" Always "pages" "relation pages that differ after masking";
    Checksum "checksum" Always "pages" "pages whose checksum does not match their content, in either directory";
    PartialPage "partial-page" Always "files" "relation files that end within a page, not alike";
    MissingFile "missing-file" Always "files" "files that recovery keeps and only one directory has";
    Directory "directory" Always "entries" "databases, tablespaces and directories of PostgreSQL that only one has";
    TablespaceShared "tablespace-shared" Always "links" "tablespace links that lead to one place: there is only one to compare";
    Slru "slru" Always "pages" "pages of pg_xact, pg_commit_ts and pg_multixact that differ";
    File "file" Always "files" "other files that recovery keeps (maps, two-phase state, mappings), with other content";
    Origin "origin" Always "origins" "replication origins whose progress differs";
    Control "control" Always "fields" "fields of pg_control that differ";

    Masked "masked" Strict "pages" "pages that differ only where PostgreSQL masks: LSN, checksum, hint bits, unused space";
    FsmHint "fsm-hint" Strict "pages" "free space map pages: changed without WAL, or not kept on disk during recovery";
    TrailingZero "trailing-zero-pages" Strict "pages" "zero pages past the end of the other relation file";
    EmptyFile "empty-file" Strict "files" "empty where the other is absent, and PostgreSQL reads both alike";
    SlruTrailingZero "slru-trailing-zero-pages" Strict "pages" "zero pages past the end of the other SLRU segment";
    OriginOrder "origin-order" Strict "files" "replorigin_checkpoint with the same origins in another order";

    ControlTime "control-time" Never "fields" "pg_control: when it was written, and the checksum that covers that";
    CommitTsBeforeOldest "commit-ts-before-oldest" Never "pages" "pg_commit_ts of transactions before oldestCommitTsXid: nobody can read it";
    TablespaceTarget "tablespace-target" Never "links" "tablespace links that lead elsewhere; what is there is compared";
    Unlogged "unlogged" Never "files" "unlogged relations: reset from their init fork when the server starts";
    Temporary "temporary" Never "files" "temporary relations and files: removed when the server starts";
    RelcacheInit "relcache-init" Never "files" "pg_internal.init: removed when the server starts";
    Wal "wal" Never "files" "pg_wal: the input of recovery, recycled by every server in its own way";
    Subtrans "subtrans" Never "files" "pg_subtrans: zeroed when the server starts";
    Notify "notify" Never "files" "pg_notify: emptied when the server starts";
    Serial "serial" Never "files" "pg_serial: of no use after a restart";
    Snapshots "snapshots" Never "files" "pg_snapshots: emptied when the server starts";
    Dynshmem "dynshmem" Never "files" "pg_dynshmem: emptied when the server starts";
    Stats "stats" Never "files" "pg_stat and pg_stat_tmp: statistics of each server of its own";
    ReplicationSlots "replication-slots" Never "files" "pg_replslot: slots belong to one server and are not in WAL";
    LogicalSnapshots "logical-snapshots" Never "files" "pg_logical/snapshots: a cache of logical decoding";
    Postmaster "postmaster" Never "files" "postmaster.pid, postmaster.opts: of the last start";
    Log "log" Never "files" "server logs";
    BackupRemains "backup-remains" Never "files" "backup_manifest, backup_label.old, tablespace_map.old: not read again";
    Signal "signal" Never "files" "recovery.signal and standby.signal: what the next start is to be";
    Config "config" Never "files" "configuration files";
    Other "other" Never "files" "files that are not PostgreSQL's";
}

impl Class {
    /// Whether a finding makes the directories different.
    pub fn is_difference(self, strict: bool) -> bool {
        match self.info().counts {
            Counts::Always => true,
            Counts::Strict => strict,
            Counts::Never => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_every_class() {
        let text = include_str!("../../../../docs/compare.md");
        for class in Class::ALL {
            let name = class.info().name;
            assert!(text.contains(&format!("| `{name}` |")), "docs/compare.md does not explain {name}");
        }
    }
}
