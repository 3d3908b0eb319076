//! What `walrider standby`, `relay` and `receive` are told about archiving what they receive.

use clap::Args;
use serde::{Deserialize, Deserializer};
use walrider_archive::archiver::ArchiverSettings;
use walrider_archive::frame::Packing;
use walrider_archive::{ArchiveError, Place};

use crate::values::{parse_size, parsed, size};

/// How many files are archived at once where nobody says.
const DEFAULT_JOBS: u16 = 4;
/// Most of them.
const MAX_JOBS: i64 = 64;

/// Reads an archive's place.
pub fn parse_place(text: &str) -> Result<Place, String> {
    Place::parse(text).map_err(|error| error.to_string())
}

/// How segments are packed.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Level 3
    #[default]
    Zstd,
    /// Less time, more bytes
    Lz4,
    /// Not at all
    None,
}

impl From<Compression> for Packing {
    fn from(compression: Compression) -> Packing {
        match compression {
            Compression::Zstd => Packing::Zstd,
            Compression::Lz4 => Packing::Lz4,
            Compression::None => Packing::Raw,
        }
    }
}

/// Where to archive, and how. Each flag is a key of the file, with underscores.
#[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArchivingOptions {
    /// Archive what is received there: an absolute path, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX (docs/archive.md)
    #[arg(long, value_name = "PLACE", value_parser = parse_place)]
    #[serde(deserialize_with = "place")]
    pub archive: Option<Place>,
    /// How segments are packed there [default: zstd]
    #[arg(long, value_name = "HOW", value_enum, requires = "archive")]
    pub archive_compression: Option<Compression>,
    /// Files archived at once [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_JOBS), requires = "archive")]
    pub archive_jobs: Option<u16>,
    /// Most WAL that waits to be archived; what is older is given up, and missing in the archive [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "archive")]
    #[serde(deserialize_with = "size")]
    pub archive_max_keep: Option<u64>,
}

impl ArchivingOptions {
    /// What this says, and where it says nothing, the other.
    pub fn or(self, other: ArchivingOptions) -> ArchivingOptions {
        macro_rules! first {
            ($($field:ident)*) => { ArchivingOptions { $($field: self.$field.or(other.$field),)* } };
        }
        first! { archive archive_compression archive_jobs archive_max_keep }
    }

    /// How to archive; `None`: nothing is archived.
    ///
    /// # Errors
    /// They do not go together.
    pub fn resolve(&self) -> Result<Option<ArchiverSettings>, ArchiveError> {
        let refused = |why: &str| Err(ArchiveError::Refused(why.to_owned()));
        let Some(place) = self.archive.clone() else {
            return match *self == ArchivingOptions::default() {
                true => Ok(None),
                false => refused("archive says where to archive; without it nothing is archived"),
            };
        };
        let jobs = self.archive_jobs.unwrap_or(DEFAULT_JOBS);
        if !(1..=MAX_JOBS).contains(&jobs.into()) {
            return refused("archive_jobs must be from 1 to 64");
        }
        let packing = self.archive_compression.unwrap_or_default().into();
        Ok(Some(ArchiverSettings { place, packing, jobs: jobs.into(), max_keep: self.archive_max_keep }))
    }
}

fn place<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Place>, D::Error> {
    parsed(deserializer, parse_place)
}
