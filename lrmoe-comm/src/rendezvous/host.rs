use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::left;
use super::message::{Answer, Hello, may_be_ours};
use crate::Error;

/// Between two looks at the port.
const PAUSE: Duration = Duration::from_millis(2);

/// Gives `bytes` to the ranks `1..ranks`.
pub(super) fn give(
    ranks: usize,
    address: (&str, u16),
    deadline: Duration,
    bytes: &[u8],
) -> Result<(), Error> {
    let start = Instant::now();
    let name = format!("{}:{}", address.0, address.1);
    let listener = listen(address).map_err(|error| Error::Address {
        address: name.clone(),
        reason: error.kind(),
    })?;
    let mut host = Host {
        listener,
        newcomers: vec![],
        guests: (1..ranks).map(|_| None).collect(),
    };
    let answer = loop {
        host.welcome(ranks);
        let missing = host.guests.iter().position(Option::is_none);
        match (missing, left(start, deadline)) {
            (None, _) => break Answer::Bytes(bytes.to_vec()),
            (Some(_), Some(_)) => thread::sleep(PAUSE),
            (Some(guest), None) => {
                let (rank, waited) = (1 + guest, start.elapsed());
                break Answer::Absent { rank, waited };
            }
        }
    };
    for stream in host.guests.into_iter().flatten() {
        // A rank that has gone by now is missed by whatever the bytes are for.
        let _ = say(stream, &answer);
    }
    answer.into_result(Hello { rank: 0, ranks }, name).map(drop)
}

/// A port on all interfaces, or on one that only this machine reaches.
fn listen((host, port): (&str, u16)) -> std::io::Result<TcpListener> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let is_local = host == "localhost" || host.parse().is_ok_and(|host: IpAddr| host.is_loopback());
    let listener = if is_local {
        TcpListener::bind(&*addresses)?
    } else {
        let any = [
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        ];
        TcpListener::bind(&any[..])?
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn say(mut stream: TcpStream, answer: &Answer) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(&answer.encode())
}

struct Host {
    listener: TcpListener,
    /// Connections that have not said all of who they are, with what they have said.
    newcomers: Vec<(TcpStream, Vec<u8>)>,
    /// The ranks from 1 on.
    guests: Vec<Option<TcpStream>>,
}

/// What a connection has been seen to do.
enum Seen {
    /// It still says something that may make sense.
    Talks,
    /// It is gone, or a stranger.
    Leaves,
    Comes(Hello),
}

impl Host {
    /// Looks once at who has come and gone.
    fn welcome(&mut self, ranks: usize) {
        for guest in &mut self.guests {
            // A rank that waits says nothing more.
            guest.take_if(|stream| !is_silent(stream));
        }
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.newcomers.push((stream, vec![]));
            }
        }
        let mut index = 0;
        while let Some((stream, said)) = self.newcomers.get_mut(index) {
            match listen_to(stream, said) {
                Seen::Talks => index += 1,
                Seen::Leaves => drop(self.newcomers.swap_remove(index)),
                Seen::Comes(hello) => {
                    let (stream, _) = self.newcomers.swap_remove(index);
                    self.seat(stream, hello, ranks);
                }
            }
        }
    }

    /// Takes a rank in, or tells it why it does not belong to the world.
    fn seat(&mut self, stream: TcpStream, hello: Hello, ranks: usize) {
        let Hello { rank, ranks: found } = hello;
        let seat = rank
            .checked_sub(1)
            .and_then(|seat| self.guests.get_mut(seat));
        let refusal = match seat {
            _ if found != ranks => Answer::WorldSize { expected: ranks },
            Some(seat @ None) => {
                *seat = Some(stream);
                return;
            }
            _ => Answer::RankTaken,
        };
        // What is not heard any more need not be said.
        let _ = say(stream, &refusal);
    }
}

/// Reads what has come, at most a hello.
fn listen_to(stream: &mut TcpStream, said: &mut Vec<u8>) -> Seen {
    let mut bytes = [0; Hello::LEN];
    loop {
        match stream.read(&mut bytes[said.len()..]) {
            Ok(0) => return Seen::Leaves,
            Ok(len) => {
                let come = &bytes[said.len()..][..len];
                said.extend_from_slice(come);
                if !may_be_ours(said) {
                    return Seen::Leaves;
                }
                if let Ok(whole) = said.as_slice().try_into() {
                    return Hello::decode(whole).map_or(Seen::Leaves, Seen::Comes);
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Seen::Talks,
            Err(_) => return Seen::Leaves,
        }
    }
}

/// Whether a rank is still connected and has said nothing more.
fn is_silent(stream: &TcpStream) -> bool {
    let peeked = stream.peek(&mut [0]);
    peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}
