use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::left;
use super::message::{Answer, Hello, may_be_ours};
use crate::Error;

/// Rank 0 has begun to wait before it is found. So it is the first to give up, and to say why.
const GRACE: Duration = Duration::from_millis(500);
/// Between two attempts to reach rank 0.
const PAUSE: Duration = Duration::from_millis(20);

/// The bytes of rank 0.
pub(super) fn receive(
    (rank, ranks): (usize, usize),
    address: (&str, u16),
    deadline: Duration,
) -> Result<Vec<u8>, Error> {
    let (start, hello) = (Instant::now(), Hello { rank, ranks });
    let name = || format!("{}:{}", address.0, address.1);
    let unusable = |error: std::io::Error| Error::Address {
        address: name(),
        reason: error.kind(),
    };
    let hosts: Vec<_> = address.to_socket_addrs().map_err(unusable)?.collect();
    for host in hosts.iter().cycle() {
        let Some(left) = left(start, deadline) else {
            break;
        };
        // Rank 0 may not listen yet, or may have gone and come again.
        let answer = TcpStream::connect_timeout(host, left)
            .and_then(|stream| ask(stream, hello, deadline.saturating_add(GRACE)));
        match answer {
            Ok(Some(answer)) => return answer.into_result(hello, name()),
            Ok(None) => return Err(Error::Stranger { address: name() }),
            Err(_) => thread::sleep(PAUSE),
        }
    }
    Err(Error::Absent {
        rank: 0,
        address: name(),
        waited: start.elapsed(),
    })
}

/// The answer of whoever listens, or `None` if that makes no sense.
fn ask(mut stream: TcpStream, hello: Hello, deadline: Duration) -> std::io::Result<Option<Answer>> {
    let start = Instant::now();
    stream.write_all(&hello.encode())?;
    let mut header = [0; Answer::HEADER];
    for end in 1..=header.len() {
        // Byte by byte, so that a stranger is known as soon as it says something else.
        read(&mut stream, &mut header[end - 1..end], start, deadline)?;
        if !may_be_ours(&header[..end]) {
            return Ok(None);
        }
    }
    let mut answer = Answer::decode(&header);
    if let Some(Answer::Bytes(bytes)) = &mut answer {
        read(&mut stream, bytes, start, deadline)?;
    }
    Ok(answer)
}

fn read(
    stream: &mut TcpStream,
    mut into: &mut [u8],
    start: Instant,
    deadline: Duration,
) -> std::io::Result<()> {
    while !into.is_empty() {
        let left = left(start, deadline).ok_or(ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(into)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            len => into = &mut into[len..],
        }
    }
    Ok(())
}
