//! Compares one segment file of a relation, page by page.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use walrider_layout::page::Page;
use walrider_layout::{BLCKSZ, BlockNumber, ForkNumber, PageBytes, RELSEG_SIZE};
use walrider_redo::mask::{first_difference, mask_page};

use super::classes::Class;
use super::kind::{PageKind, page_kind};
use super::tally::{Location, ReadError, Tally, excerpt};
use super::walk::RelationFile;

/// Bytes read at once of each file.
const CHUNK: usize = 1 << 20;
/// Bytes of a page that the LSN and the checksum take (`pd_lsn`, `pd_checksum`).
const LSN_AND_CHECKSUM: usize = 10;
/// Inner nodes of a free space map page (`NonLeafNodesPerPage`, `storage/fsm_internals.h`).
const FSM_INNER_NODES: usize = BLCKSZ / 2 - 1;
/// Where the nodes of a free space map page begin: after the header and `fp_next_slot`.
const FSM_NODES_OFFSET: usize = 28;
/// Where the bits of a visibility map page begin.
const VM_BITS_OFFSET: usize = 24;
/// Heap blocks of one byte of the visibility map.
const VM_BLOCKS_PER_BYTE: usize = 4;

/// What holds for all relation files of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Without masks.
    pub strict: bool,
    /// Whether pages carry checksums, in either directory.
    pub checksums: [bool; 2],
    /// Whether PostgreSQL lets free space maps differ between these two.
    pub fsm_may_differ: bool,
}

/// A file of either directory; `None` where it is absent.
pub type Sides<'a> = [Option<&'a Path>; 2];

/// Reads two files in step.
pub struct Pair<'a> {
    paths: Sides<'a>,
    files: [Option<File>; 2],
    buffers: [Vec<u8>; 2],
    lengths: [usize; 2],
}

impl<'a> Pair<'a> {
    /// Opens what is there.
    pub fn open(paths: Sides<'a>) -> Result<Pair<'a>, ReadError> {
        let mut files = [None, None];
        for (file, path) in files.iter_mut().zip(paths) {
            if let Some(path) = path {
                *file = Some(File::open(path).map_err(ReadError::at(path))?);
            }
        }
        Ok(Pair { paths, files, buffers: [vec![0; CHUNK], vec![0; CHUNK]], lengths: [0; 2] })
    }

    /// The next bytes of both, shorter than a chunk only at the end of the file; `None` at the end of both.
    pub fn next(&mut self, done_bytes: &AtomicU64) -> Result<Option<[&[u8]; 2]>, ReadError> {
        for side in 0..2 {
            self.lengths[side] = match (&mut self.files[side], self.paths[side]) {
                (Some(file), Some(path)) => fill(file, &mut self.buffers[side]).map_err(ReadError::at(path))?,
                _ => 0,
            };
            done_bytes.fetch_add(self.lengths[side] as u64, Ordering::Relaxed);
        }
        let [a, b] = [0, 1].map(|side| &self.buffers[side][..self.lengths[side]]);
        Ok((!a.is_empty() || !b.is_empty()).then_some([a, b]))
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Compares a segment file; a file that is absent counts as empty.
pub fn compare_segment(
    rules: Rules,
    name: &str,
    file: &RelationFile,
    paths: Sides<'_>,
    tally: &mut Tally,
    done_bytes: &AtomicU64,
) -> Result<(), ReadError> {
    let mut pair = Pair::open(paths)?;
    let mut segment = Segment { rules, name, fork: file.fork, tally };
    let mut block = file.segment.wrapping_mul(RELSEG_SIZE);
    while let Some([a, b]) = pair.next(done_bytes)? {
        segment.chunk(block, a, b);
        block = block.wrapping_add((CHUNK / BLCKSZ) as u32);
    }
    Ok(())
}

/// A segment file being compared.
struct Segment<'a> {
    rules: Rules,
    name: &'a str,
    fork: ForkNumber,
    tally: &'a mut Tally,
}

impl Segment<'_> {
    fn chunk(&mut self, first_block: BlockNumber, a: &[u8], b: &[u8]) {
        let equal = a == b;
        let (a_pages, a_rest) = a.as_chunks::<BLCKSZ>();
        let (b_pages, b_rest) = b.as_chunks::<BLCKSZ>();
        for at in 0..a_pages.len().max(b_pages.len()) {
            let block = first_block.wrapping_add(at as u32);
            self.tally.pages += 1;
            match (a_pages.get(at), b_pages.get(at)) {
                (Some(a), Some(b)) if equal || a == b => {
                    if self.rules.checksums.contains(&true) {
                        self.verify(block, [Some(a), Some(b)]);
                    }
                }
                (Some(a), Some(b)) => {
                    self.verify(block, [Some(a), Some(b)]);
                    self.compare_page(block, a, b);
                }
                (a, b) => {
                    self.verify(block, [a, b]);
                    self.one_sided(block, a, b);
                }
            }
        }
        if !equal && a_rest != b_rest {
            let block = Some(first_block.wrapping_add(a_pages.len().max(b_pages.len()) as u32));
            let place = Location { block, offset: None, field: "part of a page at the end".into() };
            let size = |rest: &[u8]| format!("{} bytes", rest.len());
            self.tally.find(Class::PartialPage, self.name, place, size(a_rest), size(b_rest));
        }
    }

    /// A page that lies past the end of the other file.
    fn one_sided(&mut self, block: BlockNumber, a: Option<&PageBytes>, b: Option<&PageBytes>) {
        let zero = [a, b].into_iter().flatten().all(is_zero);
        let class = match self.fork {
            _ if zero => Class::TrailingZero,
            ForkNumber::FreeSpaceMap if self.rules.fsm_may_differ => Class::FsmHint,
            _ => Class::Page,
        };
        let show = |page: Option<&PageBytes>| match page {
            Some(page) => format!("LSN {}", Page(page).lsn()),
            None => "past the end".to_owned(),
        };
        let place = Location { block: Some(block), offset: None, field: "page".into() };
        self.tally.find(class, self.name, place, show(a), show(b));
    }

    /// Two pages whose bytes differ.
    fn compare_page(&mut self, block: BlockNumber, a: &PageBytes, b: &PageBytes) {
        let kinds = [a, b].map(|page| page_kind(page, self.fork, block));
        let masked = [(a, kinds[0]), (b, kinds[1])].map(|(page, kind)| {
            let mut masked = *page;
            match kind {
                // Pages of two kinds have no mask in common.
                PageKind::Of(rmgr) if kinds[0] == kinds[1] => mask_page(rmgr, &mut masked, block),
                _ => masked[..LSN_AND_CHECKSUM].fill(0),
            }
            masked
        });
        let class = match kinds[0] {
            _ if masked[0] == masked[1] => Class::Masked,
            PageKind::FreeSpaceMap if self.rules.fsm_may_differ => Class::FsmHint,
            _ => Class::Page,
        };
        if !class.is_difference(self.rules.strict) {
            return self.tally.count(class);
        }
        let [left, right] = if self.rules.strict { [a, b] } else { [&masked[0], &masked[1]] };
        let place = locate(kinds[0], block, left, right);
        let offset = place.offset.unwrap_or(0);
        self.tally.find(class, self.name, place, excerpt(a, offset), excerpt(b, offset));
    }

    /// Verifies checksums of the sides that have them; one finding for the page, whichever side is wrong.
    fn verify(&mut self, block: BlockNumber, sides: [Option<&PageBytes>; 2]) {
        let wrong = [0, 1].map(|side| match sides[side] {
            Some(page) if self.rules.checksums[side] => Page(page).verify_checksum(block).err(),
            _ => None,
        });
        if wrong != [None, None] {
            let [a, b] = wrong.map(|wrong| wrong.map_or("right".to_owned(), |problem| problem.to_string()));
            let place = Location { block: Some(block), offset: Some(8), field: "pd_checksum".into() };
            self.tally.find(Class::Checksum, self.name, place, a, b);
        }
    }
}

fn is_zero(page: &PageBytes) -> bool {
    page.iter().all(|&byte| byte == 0)
}

/// The first byte at which two pages differ, and what it belongs to. They do differ.
fn locate(kind: PageKind, block: BlockNumber, a: &PageBytes, b: &PageBytes) -> Location {
    let at = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(0);
    let map_field = match kind {
        PageKind::FreeSpaceMap if at >= FSM_NODES_OFFSET => {
            let node = at - FSM_NODES_OFFSET;
            Some(match node.checked_sub(FSM_INNER_NODES) {
                Some(slot) => format!("free space of slot {slot}"),
                None => format!("inner node {node}"),
            })
        }
        PageKind::FreeSpaceMap if at >= VM_BITS_OFFSET => Some("fp_next_slot".into()),
        PageKind::VisibilityMap if at >= VM_BITS_OFFSET => {
            let byte = block as usize * (BLCKSZ - VM_BITS_OFFSET) + at - VM_BITS_OFFSET;
            let pair = ((a[at] ^ b[at]).trailing_zeros() / 2) as usize;
            Some(format!("bits of heap block {}", byte * VM_BLOCKS_PER_BYTE + pair))
        }
        _ => None,
    };
    if let Some(field) = map_field {
        return Location { block: Some(block), offset: Some(at), field };
    }
    let (offset, field) = match first_difference(a, b) {
        Some((offset, field)) => (offset, field.to_string()),
        None => (at, String::new()),
    };
    Location { block: Some(block), offset: Some(offset), field }
}

#[cfg(test)]
#[path = "relation_tests.rs"]
mod tests;
