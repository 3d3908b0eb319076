//! Files into archives (`sendFile`, `sendFileWithContent`, `read_file_data_into_buffer`; `backup/basebackup.c`, PostgreSQL 18).

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use walrider_backup::checksum::Sum;
use walrider_backup::header::{self, Attributes, Member};
use walrider_backup::manifest::{Manifest, ManifestError};
use walrider_datadir::DataDirError;
use walrider_layout::checksum::page_checksum;
use walrider_layout::page::Page;
use walrider_layout::{BLCKSZ, BlockNumber, Lsn, PageBytes, RELSEG_SIZE};

use super::sink::Sink;
use crate::refusal::{Refusal, Stopped};

/// Bytes that are read at once: whole pages.
const READ: usize = 16 * BLCKSZ;
/// How often a page is read again whose checksum is wrong, which somebody may be writing. PostgreSQL does it once, and right away.
const REREADS: usize = 3;
/// How long before that.
const REREAD_PAUSE: Duration = Duration::from_millis(5);
/// So many pages of a file are complained of one by one.
const MAX_COMPLAINTS: u64 = 5;

/// The archives of a backup.
pub(super) struct Archive<'a> {
    pub sink: Sink<'a>,
    pub manifest: Option<Manifest>,
    /// Pages are verified that have not changed since this position.
    pub verify_before: Option<Lsn>,
    /// Pages with wrong checksums.
    pub failures: u64,
    buffer: Vec<u8>,
}

/// What a file is called.
#[derive(Clone, Copy)]
pub(super) struct Name<'n> {
    /// In the archive.
    pub archive: &'n [u8],
    /// What precedes it in the manifest, where all is below the data directory.
    pub above: &'n str,
}

impl<'n> Name<'n> {
    /// Of a file in the data directory's archive.
    pub fn of(archive: &'n [u8]) -> Name<'n> {
        Name { archive, above: "" }
    }

    fn whole(self) -> Vec<u8> {
        [self.above.as_bytes(), self.archive].concat()
    }
}

impl<'a> Archive<'a> {
    pub fn new(sink: Sink<'a>, manifest: Option<Manifest>, verify_before: Option<Lsn>) -> Archive<'a> {
        Archive { sink, manifest, verify_before, failures: 0, buffer: vec![0; READ] }
    }

    /// A directory or a link.
    pub fn member(&mut self, name: &[u8], member: Member<'_>, attributes: Attributes) -> Result<(), Stopped> {
        self.sink.data(&header::header(name, member, attributes)?)
    }

    fn padding(&mut self, len: u64) -> Result<(), Stopped> {
        self.sink.zeros(header::padding(len) as u64)
    }

    fn sum(&self) -> Sum {
        self.manifest.as_ref().map_or(Sum::None, |manifest| Sum::new(manifest.checksums()))
    }

    fn note(&mut self, name: Name<'_>, len: u64, mtime: i64, sum: Sum) -> Result<(), Stopped> {
        if let Some(manifest) = &mut self.manifest {
            manifest.add(&name.whole(), len, mtime, sum).map_err(ManifestError::Io)?;
        }
        Ok(())
    }

    /// A file with these contents.
    pub fn contents(&mut self, name: Name<'_>, contents: &[u8], attributes: Attributes) -> Result<(), Stopped> {
        let len = contents.len() as u64;
        self.member(name.archive, Member::File(len), attributes)?;
        let mut sum = self.sum();
        sum.update(contents);
        self.sink.data(contents)?;
        self.padding(len)?;
        self.note(name, len, attributes.mtime, sum)
    }

    /// A file, as long as it is now. `relation`: a segment of this number, of pages. Whether it was there.
    ///
    /// What is added while it is sent is left out, and what is cut off is sent as zeros: replay of the WAL does both again.
    pub fn file(&mut self, path: &Path, name: Name<'_>, relation: Option<u32>) -> Result<bool, Stopped> {
        let Some((file, metadata)) = open(path)? else { return Ok(false) };
        let (len, attributes) = (metadata.len(), Attributes::of(&metadata));
        self.member(name.archive, Member::File(len), attributes)?;
        let mut sum = self.sum();
        let mut verify = relation.is_some() && self.verify_before.is_some();
        let mut pages = Pages {
            first: relation.unwrap_or(0).saturating_mul(RELSEG_SIZE),
            before: self.verify_before.unwrap_or(Lsn::INVALID),
            name: String::from_utf8_lossy(&name.whole()).into_owned(),
            failures: 0,
        };
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut at = 0;
        while at < len {
            let wanted = READ.min(usize::try_from(len - at).unwrap_or(READ));
            let read = read_full(&file, &mut buffer[..wanted], at).map_err(|error| failed("read file", path, error))?;
            if read == 0 {
                break;
            }
            if verify && read % BLCKSZ == 0 {
                pages.check(&mut self.sink, &file, &mut buffer[..read], at)?;
            } else if verify {
                let message = format!(
                    "could not verify checksum in file \"{}\", block {}: read buffer size {read} and page size {BLCKSZ} differ",
                    pages.name,
                    at / BLCKSZ as u64
                );
                self.sink.notice("WARNING", "01000", message)?;
                verify = false;
            }
            sum.update(&buffer[..read]);
            self.sink.data(&buffer[..read])?;
            at += read as u64;
        }
        buffer.fill(0);
        while at < len {
            let part = READ.min(usize::try_from(len - at).unwrap_or(READ));
            sum.update(&buffer[..part]);
            self.sink.data(&buffer[..part])?;
            at += part as u64;
        }
        self.buffer = buffer;
        self.padding(len)?;
        if pages.failures > 1 {
            let message =
                format!("file \"{}\" has a total of {} checksum verification failures", pages.name, pages.failures);
            self.sink.notice("WARNING", "01000", message)?;
        }
        self.failures += pages.failures;
        self.note(name, len, attributes.mtime, sum)?;
        Ok(true)
    }

    /// A WAL segment, which is not in the manifest: `len` bytes of it, or it is refused.
    pub fn segment(&mut self, path: &Path, name: &[u8], len: u64) -> Result<(), Stopped> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (file, metadata) = open(path)?.ok_or_else(|| failed("open file", path, gone()))?;
        let short = || Refusal::new("58030", format!("unexpected WAL file size \"{}\"", String::from_utf8_lossy(name)));
        if metadata.len() != len {
            return Err(short().into());
        }
        self.member(name, Member::File(len), Attributes::of(&metadata))?;
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut at = 0;
        while at < len {
            let wanted = READ.min(usize::try_from(len - at).unwrap_or(READ));
            let read = read_full(&file, &mut buffer[..wanted], at).map_err(|error| failed("read file", path, error))?;
            if read == 0 {
                return Err(short().into());
            }
            self.sink.data(&buffer[..read])?;
            at += read as u64;
        }
        self.buffer = buffer;
        self.padding(len)
    }
}

/// `None`: it is not there any more.
fn open(path: &Path) -> Result<Option<(File, Metadata)>, Refusal> {
    let opened = File::open(path).and_then(|file| file.metadata().map(|metadata| (file, metadata)));
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).map_err(|error| failed("open file", path, error)),
    }
}

fn failed(operation: &'static str, path: &Path, error: io::Error) -> Refusal {
    DataDirError::io(operation, path, error).into()
}

/// Reads until the buffer is full, or the file ends.
fn read_full(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], at + read as u64) {
            Ok(0) => break,
            Ok(len) => read += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// The pages of a file, while it is read.
struct Pages {
    /// The block that the file begins with.
    first: BlockNumber,
    /// A page that has changed since need not be right: replay brings its image.
    before: Lsn,
    name: String,
    failures: u64,
}

impl Pages {
    /// Verifies pages that were read at an offset. One that is wrong is read again.
    fn check(&mut self, sink: &mut Sink<'_>, file: &File, pages: &mut [u8], at: u64) -> Result<(), Stopped> {
        for (number, page) in pages.as_chunks_mut::<BLCKSZ>().0.iter_mut().enumerate() {
            let at = at + (number * BLCKSZ) as u64;
            let block = self.first.wrapping_add((at / BLCKSZ as u64) as BlockNumber);
            let mut found = wrong_checksum(page, block, self.before);
            for _ in 0..REREADS {
                if found.is_none() {
                    break;
                }
                std::thread::sleep(REREAD_PAUSE);
                // Cut off meanwhile: the page does not matter.
                let read = read_full(file, page, at).unwrap_or(0);
                found = if read == BLCKSZ { wrong_checksum(page, block, self.before) } else { None };
            }
            let Some(computed) = found else { continue };
            self.failures += 1;
            if self.failures <= MAX_COMPLAINTS {
                let stored = Page(page).checksum();
                let message = format!(
                    "checksum verification failed in file \"{}\", block {block}: calculated {computed:X} but expected {stored:X}",
                    self.name
                );
                sink.notice("WARNING", "01000", message)?;
            }
            if self.failures == MAX_COMPLAINTS {
                let message =
                    format!("further checksum verification failures in file \"{}\" will not be reported", self.name);
                sink.notice("WARNING", "01000", message)?;
            }
        }
        Ok(())
    }
}

/// What the checksum of a page should be, if it is another, and the page must be right: it is not new, and has not changed since
/// `before` (`verify_page_checksum`).
fn wrong_checksum(bytes: &PageBytes, block: BlockNumber, before: Lsn) -> Option<u16> {
    let page = Page(bytes);
    if page.upper() == 0 || page.lsn() >= before {
        return None;
    }
    Some(page_checksum(bytes, block)).filter(|&computed| computed != page.checksum())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page with a position and its checksum.
    fn page(lsn: u64, block: BlockNumber) -> PageBytes {
        let mut page = [7; BLCKSZ];
        page[..8].copy_from_slice(&lsn.rotate_left(32).to_le_bytes());
        let checksum = page_checksum(&page, block);
        page[8..10].copy_from_slice(&checksum.to_le_bytes());
        page
    }

    #[test]
    fn pages_that_must_be_right_are_verified() {
        let before = Lsn(0x1_0000_0028);
        let mut bytes = page(before.0 - 1, 5);
        assert_eq!(Page(&bytes).lsn(), Lsn(before.0 - 1));
        assert_eq!(wrong_checksum(&bytes, 5, before), None);
        assert!(wrong_checksum(&bytes, 6, before).is_some(), "it belongs elsewhere");
        bytes[8000] ^= 1;
        assert_eq!(wrong_checksum(&bytes, 5, before), Some(page_checksum(&bytes, 5)));
        let mut changed = page(before.0, 5);
        changed[8000] ^= 1;
        assert_eq!(wrong_checksum(&changed, 5, before), None, "replay brings its image");
        assert_eq!(wrong_checksum(&[0; BLCKSZ], 5, before), None, "new");
    }

    #[test]
    fn a_file_that_ends_early_is_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1; 100]).unwrap();
        let (open, metadata) = open(file.path()).unwrap().unwrap();
        let mut buffer = [0; 64];
        let read = |buffer: &mut [u8], at| read_full(&open, buffer, at).unwrap();
        assert_eq!(
            (metadata.len(), read(&mut buffer, 0), read(&mut buffer, 64), read(&mut buffer, 100)),
            (100, 64, 36, 0)
        );
        std::fs::remove_file(file.path()).unwrap();
        assert!(super::open(file.path()).unwrap().is_none());
    }
}
