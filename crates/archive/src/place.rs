//! Where an archive is.

use std::fmt;
use std::path::{Path, PathBuf};

use url::Url;

use crate::error::{ArchiveError, Result};

/// Variables of the environment that belong to object stores begin so.
const VARIABLES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// A directory, or a prefix in an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory, by its absolute path.
    Directory(PathBuf),
    /// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`.
    Objects(Url),
}

impl Place {
    /// Reads a path or an URL.
    ///
    /// ```
    /// use walrider_archive::Place;
    /// assert_eq!(Place::parse("/mnt/archive").unwrap(), Place::parse("file:///mnt/archive").unwrap());
    /// assert_eq!(Place::parse("s3://bucket/main/").unwrap().to_string(), "s3://bucket/main");
    /// assert!(Place::parse("archive").is_err());
    /// assert!(Place::parse("ftp://host/archive").is_err());
    /// ```
    ///
    /// # Errors
    /// A relative path: `archive_command` and `restore_command` run in the data directory, which need not be the same. A scheme
    /// that is not known.
    pub fn parse(text: &str) -> Result<Place> {
        let refused = |why: String| ArchiveError::Refused(format!("\"{text}\" is no place for an archive: {why}"));
        let path = if text.contains("://") {
            let mut url = Url::parse(text).map_err(|error| refused(error.to_string()))?;
            match url.scheme() {
                "file" => url.to_file_path().map_err(|()| refused("write file:///PATH".into()))?,
                "s3" | "gs" | "az" => {
                    if url.host_str().is_none_or(str::is_empty) {
                        return Err(refused("the bucket is missing".into()));
                    }
                    if url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
                        return Err(refused("passwords and options belong into the environment".into()));
                    }
                    let path = url.path().trim_end_matches('/').to_owned();
                    url.set_path(&path);
                    return Ok(Place::Objects(url));
                }
                other => return Err(refused(format!("{other}:// is not known; there are file, s3, gs and az"))),
            }
        } else {
            PathBuf::from(text)
        };
        match path.is_absolute() {
            true => Ok(Place::Directory(path.components().collect())),
            false => Err(refused("write an absolute path, or an URL".into())),
        }
    }

    /// The directory, if it is one.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Place::Directory(path) => Some(path),
            Place::Objects(_) => None,
        }
    }

    /// What tells this archive from all others: the same URL means another place with another endpoint.
    pub fn identity(&self) -> String {
        let mut identity = self.to_string();
        if matches!(self, Place::Objects(_)) {
            let mut endpoints: Vec<(String, String)> = environment().collect();
            endpoints.retain(|(name, _)| {
                ["ENDPOINT", "ACCOUNT", "BASE_URL", "REGION"].iter().any(|word| name.contains(word))
            });
            endpoints.sort();
            for (name, value) in endpoints {
                identity.push_str(&format!("\n{name}={value}"));
            }
        }
        identity
    }
}

/// Variables of the environment that object stores read.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| VARIABLES.iter().any(|prefix| name.starts_with(prefix)))
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Directory(path) => write!(formatter, "{}", path.display()),
            Place::Objects(url) => write!(formatter, "{}", url.as_str().trim_end_matches('/')),
        }
    }
}
