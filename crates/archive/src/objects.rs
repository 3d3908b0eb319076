//! An archive in an object store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use futures_util::stream::{self, StreamExt};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::runtime::Runtime;
use url::Url;

use crate::archive::{Backend, Look, MAX_FILE};
use crate::error::{ArchiveError, Result};
use crate::name::WAL;
use crate::place::environment;

/// How long one request may take: a segment of 16 MB, or a piece of a backup's, at 2 Mbit/s. What takes longer is asked for again.
const REQUEST_TIMEOUT: &str = "60 seconds";
/// Longer than one, and shorter than it takes until one that is repeated is given up.
const ONE_REQUEST: Duration = Duration::from_secs(90);

/// An object store, spoken to by the thread that asks.
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    shown: String,
    runtime: Runtime,
    /// How long it may take to begin an answer, repetitions and all; `None`: as long as it is repeated.
    answers_within: Option<Duration>,
}

impl Objects {
    /// The one of an URL, with endpoint and credentials from the environment.
    ///
    /// # Errors
    /// What is missing or wrong there.
    pub fn open(url: &Url) -> Result<Objects> {
        #[cfg(feature = "transport")]
        // Another may be there already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let options = [("timeout".to_owned(), REQUEST_TIMEOUT.to_owned())].into_iter().chain(environment());
        let (store, prefix) = object_store::parse_url_opts(url, options)
            .map_err(|source| failed("open", url.as_str().to_owned(), source))?;
        Objects::new(store.into(), prefix, url.as_str().trim_end_matches('/'))
    }

    /// One that is open.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: Path, shown: &str) -> Result<Objects> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| ArchiveError::Refused(format!("could not begin to fetch: {error}")))?;
        Ok(Objects { store, prefix, shown: shown.to_owned(), runtime, answers_within: None })
    }

    /// One that is asked for files by who has something better to do than to wait for one that is silent.
    pub fn answering_within(self, time: Duration) -> Objects {
        Objects { answers_within: Some(time), ..self }
    }

    async fn in_time<T>(&self, asks: impl Future<Output = object_store::Result<T>>) -> object_store::Result<T> {
        let Some(time) = self.answers_within else { return asks.await };
        tokio::time::timeout(time, asks).await.unwrap_or_else(|_| {
            let source = format!("no answer within {} s", time.as_secs()).into();
            Err(Error::Generic { store: "archive", source })
        })
    }

    /// The store.
    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// Does something that asks it, and what that has begun besides.
    pub(crate) fn run<T>(&self, asks: impl Future<Output = T>) -> T {
        self.runtime.block_on(asks)
    }

    /// What is right below the prefix: objects with their lengths, and names that others are below of.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub(crate) fn list_all(&self) -> Result<Vec<(String, Option<u64>)>> {
        let listed = self.runtime.block_on(self.store.list_with_delimiter(Some(&self.prefix)));
        let listed = listed.map_err(|source| failed("list", self.shown.clone(), source))?;
        let name = |path: &Path| path.filename().unwrap_or_default().to_owned();
        // Consoles make an object for a folder, which has its name.
        let objects = listed.objects.iter().filter(|object| object.location != self.prefix);
        let objects = objects.map(|object| (name(&object.location), Some(object.size)));
        Ok(objects.chain(listed.common_prefixes.iter().map(|path| (name(path), None))).collect())
    }

    pub(crate) fn path(&self, key: &str) -> Path {
        key.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    async fn which_of(&self, keys: &[String]) -> Result<Option<String>> {
        let heads = keys.iter().map(|key| async move { (key, self.in_time(self.store.head(&self.path(key))).await) });
        for (key, head) in join_all(heads).await {
            match head {
                Ok(_) => return Ok(Some(key.clone())),
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("look for", key)(error)),
            }
        }
        Ok(None)
    }

    pub(crate) fn failed(&self, operation: &'static str, key: &str) -> impl Fn(Error) -> ArchiveError {
        let object = self.shown(key);
        move |source| failed(operation, object.clone(), source)
    }
}

fn failed(operation: &'static str, object: String, source: Error) -> ArchiveError {
    ArchiveError::Store { operation, object, source: Box::new(source) }
}

impl Backend for Objects {
    fn read(&self, key: &str, found: &mut dyn FnMut()) -> Result<Option<Vec<u8>>> {
        let read = async {
            let object = match self.in_time(self.store.get(&self.path(key))).await {
                Err(Error::NotFound { .. }) => return Ok(Ok(None)),
                other => other?,
            };
            found();
            match object.meta.size {
                // A body longer than it says is none: the transport ends there.
                size if size > MAX_FILE => Ok(Err(size)),
                _ => object.bytes().await.map(|bytes| Ok(Some(bytes.into()))),
            }
        };
        self.runtime.block_on(read).map_err(self.failed("read", key))?.map_err(|size| ArchiveError::Damaged {
            object: self.shown(key),
            reason: format!("it has {size} bytes, and no file of the archive has more than {MAX_FILE}"),
        })
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<bool> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let payload = PutPayload::from(bytes.to_vec());
        let put = || self.runtime.block_on(self.store.put_opts(&self.path(key), payload.clone(), options.clone()));
        let began = Instant::now();
        let done = match put() {
            // The library repeats refusals alone, as it may have been done; then the next is told so, and who asks compares.
            Err(Error::Generic { .. }) if began.elapsed() < ONE_REQUEST => put(),
            done => done,
        };
        match done {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(self.failed("write", key)(error)),
        }
    }

    /// What a store has answered is durable.
    fn settle(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn which(&self, keys: &[String]) -> Result<Option<String>> {
        self.runtime.block_on(self.which_of(keys))
    }

    fn look(&self, keys: &[String]) -> Result<Look> {
        // Beside each other: recovery waits for the answer.
        let wal = self.path(WAL);
        let listed = self.in_time(self.store.list_with_delimiter(Some(&wal)));
        let (there, listed) = self.runtime.block_on(join(self.which_of(keys), listed));
        if let Some(key) = there? {
            return Ok(Look::There(key));
        }
        let listed = listed.map_err(self.failed("list", WAL))?;
        let empty = listed.common_prefixes.is_empty() && listed.objects.iter().all(|object| object.location == wal);
        Ok(if empty { Look::Empty } else { Look::Missing })
    }

    fn directories(&self) -> Result<Vec<String>> {
        let listed = self.runtime.block_on(self.store.list_with_delimiter(Some(&self.path(WAL))));
        let listed = listed.map_err(self.failed("list", WAL))?;
        Ok(listed.common_prefixes.iter().filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    fn list(&self, directory: &str) -> Result<Vec<String>> {
        let key = format!("{WAL}/{directory}");
        let list = self.store.list(Some(&self.path(&key)));
        let found: Vec<_> = self.runtime.block_on(list.collect());
        let found: std::result::Result<Vec<_>, _> = found.into_iter().collect();
        let found = found.map_err(self.failed("list", &key))?;
        let mut names: Vec<String> =
            found.iter().filter_map(|object| object.location.filename().map(str::to_owned)).collect();
        names.sort();
        Ok(names)
    }

    fn remove(&self, keys: &[String]) -> Result<()> {
        let paths: Vec<_> = keys.iter().map(|key| Ok(self.path(key))).collect();
        let removed: Vec<_> = self.runtime.block_on(self.store.delete_stream(stream::iter(paths).boxed()).collect());
        for (removed, key) in removed.into_iter().zip(keys) {
            match removed {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("remove", key)(error)),
            }
        }
        Ok(())
    }

    fn shown(&self, key: &str) -> String {
        format!("{}/{key}", self.shown)
    }
}
