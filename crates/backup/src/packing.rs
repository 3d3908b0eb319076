//! Compressed archives: what packs and unpacks them.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Bytes that are handed on at once, and how many such pieces may wait.
const PIECE: usize = 1 << 18;
const PIECES: usize = 8;
/// Bytes written at once.
const WRITTEN: usize = 1 << 20;

/// How an archive is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    None,
    /// `.gz`
    Gzip,
    /// `.lz4`
    Lz4,
    /// `.zst`
    Zstd,
}

impl Packing {
    /// All of them.
    pub const ALL: [Packing; 4] = [Packing::None, Packing::Gzip, Packing::Lz4, Packing::Zstd];

    /// What is appended to the name of an archive.
    pub fn ending(self) -> &'static str {
        match self {
            Packing::None => "",
            Packing::Gzip => ".gz",
            Packing::Lz4 => ".lz4",
            Packing::Zstd => ".zst",
        }
    }

    /// Unpacks a file, in a thread of its own where there is something to do.
    pub(crate) fn unpack(self, file: impl Read + Send + 'static) -> io::Result<Box<dyn Read>> {
        Ok(match self {
            Packing::None => Box::new(file),
            Packing::Gzip => beside(flate2::read::MultiGzDecoder::new(file))?,
            Packing::Lz4 => beside(lz4_flex::frame::FrameDecoder::new(file))?,
            Packing::Zstd => beside(zstd::stream::read::Decoder::new(file)?)?,
        })
    }

    /// Packs into a file, with the level that the program of that name has by default.
    pub(crate) fn pack(self, file: File) -> io::Result<Packed> {
        Ok(match self {
            Packing::None => Packed::Plain(BufWriter::with_capacity(WRITTEN, file)),
            Packing::Gzip => Packed::Gzip(flate2::write::GzEncoder::new(file, flate2::Compression::default())),
            Packing::Lz4 => Packed::Lz4(Box::new(lz4_flex::frame::FrameEncoder::new(file))),
            Packing::Zstd => Packed::Zstd(zstd::stream::write::Encoder::new(file, 0)?),
        })
    }
}

/// A file that is being packed.
pub(crate) enum Packed {
    Plain(BufWriter<File>),
    Gzip(flate2::write::GzEncoder<File>),
    Lz4(Box<lz4_flex::frame::FrameEncoder<File>>),
    Zstd(zstd::stream::write::Encoder<'static, File>),
}

impl Packed {
    /// Ends it; durable on return.
    pub fn finish(self) -> io::Result<()> {
        let file = match self {
            Packed::Plain(out) => out.into_inner().map_err(io::IntoInnerError::into_error)?,
            Packed::Gzip(out) => out.finish()?,
            Packed::Lz4(out) => out.finish().map_err(io::Error::other)?,
            Packed::Zstd(out) => out.finish()?,
        };
        file.sync_all()
    }

    fn out(&mut self) -> &mut dyn Write {
        match self {
            Packed::Plain(out) => out,
            Packed::Gzip(out) => out,
            Packed::Lz4(out) => out,
            Packed::Zstd(out) => out,
        }
    }
}

impl Write for Packed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out().flush()
    }
}

/// Reads in a thread beside the reader.
fn beside(reader: impl Read + Send + 'static) -> io::Result<Box<dyn Read>> {
    let (sender, receiver) = sync_channel(PIECES);
    thread::Builder::new().name("unpack".to_owned()).spawn(move || read_all(reader, &sender))?;
    Ok(Box::new(Beside { receiver, piece: Vec::new(), at: 0, ended: false }))
}

/// Ends when nobody wants more.
fn read_all(mut reader: impl Read, sender: &SyncSender<io::Result<Vec<u8>>>) {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        let read = (&mut reader).take(PIECE as u64).read_to_end(&mut piece);
        let is_last = piece.is_empty() || read.is_err();
        if sender.send(read.map(|_| piece)).is_err() || is_last {
            return;
        }
    }
}

struct Beside {
    receiver: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Read for Beside {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() && !self.ended {
            let gone = |_| Err(io::Error::other("the thread that unpacks has ended"));
            self.piece = self.receiver.recv().unwrap_or_else(gone)?;
            self.at = 0;
            self.ended = self.piece.is_empty();
        }
        let len = buffer.len().min(self.piece.len() - self.at);
        buffer[..len].copy_from_slice(&self.piece[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_damage_is_seen() {
        let contents: Vec<u8> = (0..3 * PIECE + 7).map(|at| ((at * at) >> 7) as u8).collect();
        for packing in Packing::ALL {
            let mut file = tempfile::tempfile().unwrap();
            let mut packed = packing.pack(file.try_clone().unwrap()).unwrap();
            packed.write_all(&contents).unwrap();
            packed.finish().unwrap();
            let read = |mut file: File| {
                file.rewind().unwrap();
                let mut unpacked = Vec::new();
                packing.unpack(file)?.read_to_end(&mut unpacked).map(|_| unpacked)
            };
            assert_eq!(read(file.try_clone().unwrap()).unwrap(), contents, "{packing:?}");
            if packing != Packing::None {
                let len = file.metadata().unwrap().len();
                file.set_len(len / 2).unwrap();
                let cut = read(file.try_clone().unwrap());
                assert!(cut.is_err_and(|error| !error.to_string().contains("thread")), "{packing:?}");
                file.rewind().unwrap();
            }
        }
    }
}
